"""Heads that read one hidden state and keep no KV cache: what Medusa and the MLP speculator have in common.

Owns checkpoints of such heads, and which state belongs to a request. Draft tokens are the heads' likeliest, and count
as certain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open

from outrider.config import DraftSettings
from outrider.errors import ModelError
from outrider.model_executor.device_setup import keep_to_set_threads, prepare_device, resolve_device
from outrider.model_executor.loader.checkpoint import read_tensors
from outrider.model_executor.models.json_files import read_object, shown
from outrider.types import LAST_HIDDEN_STATE, HiddenStates
from outrider_draft.proposers.base import UNLIMITED_LENGTH, DraftTokens, ProposalRequest, Proposer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_tensor(states: HiddenStates, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states, inline or from a plane, as [N, F] on the device; their size is checked where they arrive."""
    if not states.num_rows:
        return torch.empty(0, states.width, device=device, dtype=dtype)
    if states.tensor is not None:  # fetched from a plane
        fetched: torch.Tensor = states.tensor
        return fetched.to(device=device, dtype=dtype)
    flat = torch.frombuffer(bytearray(states.payload), dtype=_DTYPES[states.dtype])
    return flat.view(states.num_rows, states.width).to(device=device, dtype=dtype)


Weights = Mapping[str, torch.Tensor]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types of tensors that are converted to the model's."""
INTEGERS = (torch.int64, torch.int32)
"""Types of ids."""


class StateHeadProposer(Proposer):
    """Proposes from the state that the target's head read when it gave the newest token."""

    hidden_state_layers = (LAST_HIDDEN_STATE,)
    prefix: ClassVar[str]
    """Prefix left out of the names of a checkpoint's tensors."""
    max_draft_length: int
    """Tokens that the heads give."""
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def __init__(self, weights: Weights, config: Mapping[str, Any], *, max_model_len: int = UNLIMITED_LENGTH) -> None:
        """``ModelError`` for weights that are not those of the configuration."""

    @classmethod
    def load(cls, settings: DraftSettings) -> Self:
        """Proposer from the model's folder."""
        folder = Path(settings.model or "")
        config = read_object(folder / "config.json")
        length = settings.max_model_len or UNLIMITED_LENGTH
        weights = _read_weights(settings, cls.prefix)
        try:
            return cls(weights, config, max_model_len=length)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error

    @abstractmethod
    def draft(self, states: torch.Tensor, token_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """``num_tokens`` tokens after each of ``token_ids`` [B], from the states [B, H] before them: [B, K]."""

    def propose(self, requests: Sequence[ProposalRequest]) -> Sequence[DraftTokens]:
        """All requests together."""
        keep_to_set_threads()
        states = [self._state_of(request) for request in requests]
        asked = [(request, state) for request, state in zip(requests, states, strict=True) if state is not None]
        if not asked:
            return [DraftTokens()] * len(requests)
        longest = min(self.max_draft_length, max(request.num_tokens for request, _ in asked))
        newest = torch.tensor([request.token_ids[-1] for request, _ in asked], device=self.device)
        with torch.inference_mode():
            found = self.draft(torch.cat([state for _, state in asked]), newest, longest).tolist()
        drafts = iter(found)
        return [
            DraftTokens() if state is None else DraftTokens(next(drafts)[: request.num_tokens])
            for request, state in zip(requests, states, strict=True)
        ]

    def _state_of(self, request: ProposalRequest) -> torch.Tensor | None:
        """[1, H]; None where nothing is wanted, or the token has no state before it."""
        states = request.hidden_states
        if not request.num_tokens or states is None or not states.num_rows or states.end != len(request.token_ids) - 1:
            return None
        return as_tensor(states.between(states.end - 1, states.end), device=self.device, dtype=self.dtype)


def _read_weights(settings: DraftSettings, prefix: str) -> dict[str, torch.Tensor]:
    """All tensors of the model's folder on the settings' device, in one type; a prefix of their names is left out."""
    folder = Path(settings.model or "")
    device = torch.device(resolve_device(settings.device))
    named = prepare_device(str(device), settings.dtype, settings.num_threads)
    found: dict[str, torch.Tensor] = {}
    for file in sorted({tensor.file for tensor in read_tensors(folder).values()}):
        with safe_open(file, framework="pt", device=str(device)) as handle:
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                found[name.replace(prefix, "", 1)] = handle.get_tensor(name)
    dtype = next((each.dtype for each in found.values() if each.dtype in _FLOATS), torch.float32)
    dtype = dtype if named == "auto" else getattr(torch, named)
    return {name: each.to(dtype) if each.dtype in _FLOATS else each for name, each in found.items()}


class TakenTensors:
    """Tensors of a checkpoint, taken by name. ``ModelError`` names the first at fault and what was expected of it."""

    def __init__(self, weights: Weights, method: str) -> None:
        self._weights, self._method = weights, method
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        """True if there is such a tensor."""
        return name in self._weights

    def num_rows(self, name: str) -> int:
        """Number of rows of a tensor that may be missing."""
        found = self._weights.get(name)
        return found.shape[0] if found is not None and found.dim() else 0

    def take(self, name: str, shape: Sequence[int], types: Sequence[torch.dtype] = _FLOATS) -> torch.Tensor:
        """A tensor of this shape and one of these types."""
        found = self._weights.get(name)
        if found is None:
            have = ", ".join(sorted(self._weights)[:4])
            raise ModelError(f"{self._method}: tensor {name} {list(shape)} is missing; the folder has {have}, ...")
        if list(found.shape) != list(shape):
            raise ModelError(f"{self._method}: tensor {name} should be {list(shape)}, and is {list(found.shape)}")
        if found.dtype not in types:
            supported = ", ".join(map(_name, types))
            # Floats have been converted: what they were on file is not known here.
            kind = "holds floats" if found.dtype in _FLOATS else f"is of type {_name(found.dtype)}"
            raise ModelError(f"{self._method}: tensor {name} {kind}; supported are {supported}")
        self._taken.add(name)
        return found

    def check_rest(self, is_passed_over: Callable[[str], bool]) -> None:
        """Raise ``ModelError`` for a tensor that was not taken, as other heads do; but for those that need not be."""
        rest = [name for name in self._weights if name not in self._taken and not is_passed_over(name)]
        if rest:
            raise ModelError(
                f"{self._method}: tensor {rest[0][:100]} is not part of such heads as config.json has them"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def number(config: Mapping[str, Any], key: str, method: str, default: int | None = None) -> int:
    """A positive number of config.json; ``ModelError`` where it is missing or none."""
    value = config.get(key, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{method}: config.json should give {key} as a positive number, not {shown(value)}")
    return value
