"""Heads that read one hidden state and keep no KV cache: what Medusa and the MLP speculator have in common.

Owns checkpoints of such heads, and which state belongs to a request. Draft tokens are the heads' likeliest, and count
as certain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open

from outrider.config import DraftSettings
from outrider.errors import ModelError
from outrider.model_executor.device_setup import keep_to_set_threads, prepare_device, resolve_device
from outrider.model_executor.loader.checkpoint import read_tensors
from outrider.model_executor.models.json_files import read_object
from outrider.types import LAST_HIDDEN_STATE
from outrider_draft.proposers.base import UNLIMITED_LENGTH, DraftTokens, ProposalRequest, Proposer
from outrider_draft.proposers.states import as_tensor

Weights = Mapping[str, torch.Tensor]


class StateHeadProposer(Proposer):
    """Proposes from the state that the target's head read when it gave the newest token."""

    hidden_state_layers = (LAST_HIDDEN_STATE,)
    prefix: ClassVar[str]
    """Left out of the names of a checkpoint's tensors."""
    max_draft_length: int
    """Tokens that the heads give."""
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def __init__(self, weights: Weights, config: Mapping[str, Any], *, max_model_len: int = UNLIMITED_LENGTH) -> None:
        """``ModelError`` for weights that are not those of the configuration."""

    @classmethod
    def load(cls, settings: DraftSettings) -> Self:
        """From the model's folder."""
        config = read_object(Path(settings.model or "") / "config.json")
        length = settings.max_model_len or UNLIMITED_LENGTH
        return cls(_read_weights(settings, cls.prefix), config, max_model_len=length)

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
    dtype = next((each.dtype for each in found.values() if each.is_floating_point()), torch.float32)
    dtype = dtype if named == "auto" else getattr(torch, named)
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in found.items()}


def take(weights: Weights, name: str, shape: Sequence[int], method: str) -> torch.Tensor:
    """A tensor of a checkpoint; ``ModelError`` that says what was expected where it is missing or of another shape."""
    found = weights.get(name)
    if found is None:
        have = ", ".join(sorted(weights)[:4])
        raise ModelError(f"{method}: tensor {name} {list(shape)} is missing; the folder has {have}, ...")
    if list(found.shape) != list(shape):
        raise ModelError(f"{method}: tensor {name} should be {list(shape)}, and is {list(found.shape)}")
    return found


def number(config: Mapping[str, Any], key: str, method: str, default: int | None = None) -> int:
    """A positive number of config.json; ``ModelError`` where it is missing or none."""
    value = config.get(key, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{method}: config.json should give {key} as a positive number, not {value!r}")
    return value
