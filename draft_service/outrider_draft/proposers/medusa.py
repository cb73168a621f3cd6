"""Proposals by Medusa heads: head i guesses the token i + 1 places after the newest, all from one hidden state.

Cai et al., "Medusa", 2024 (arXiv 2401.10774), Medusa-1 without its tree: the likeliest token of each head.

Checkpoints are those that vLLM reads (``vllm/model_executor/models/medusa.py``): ``blocks.I.layers.L.weight`` and, with
``medusa_fc_bias``, ``.bias``; ``lm_heads.I.weight``, one for all with ``original_lm_head``; ``token_map`` for a reduced
vocabulary. And the authors' own (github.com/FasterDecoding/Medusa, ``medusa_lm_head.safetensors``): ``I.L.linear.``
``weight`` and ``bias``, the head ``I.N.weight`` behind N layers, numbers as ``medusa_num_heads`` and
``medusa_num_layers``, sizes in the tensors alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from outrider.config import DraftSettings
from outrider.errors import ModelError
from outrider.model_executor.device_setup import device_facts
from outrider_draft.proposers.base import UNLIMITED_LENGTH
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, without_kv
from outrider_draft.proposers.state_heads import INTEGERS, StateHeadProposer, TakenTensors, Weights, number

_METHOD = "medusa"
_OF_HEAD = re.compile(r"(blocks|lm_heads)\.(\d{1,9})\..+")


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """Medusa heads, served."""
    proposer, name = MedusaProposer.load(settings), Path(settings.model or "").resolve().name
    return without_kv(proposer, settings, name, device=device_facts(proposer.device))


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    """Weight [H, H] and bias [H] of each residual layer."""
    output: torch.Tensor  # [V', H]

    def logits(self, states: torch.Tensor) -> torch.Tensor:  # [B, H] -> [B, V']
        """Logits of the head's token."""
        for weight, bias in self.layers:
            states = states + F.silu(F.linear(states, weight, bias))
        return F.linear(states, self.output)


class MedusaProposer(StateHeadProposer):
    """Proposes the likeliest token of each head."""

    prefix = "medusa_heads."

    def __init__(self, weights: Weights, config: Mapping[str, Any], *, max_model_len: int = UNLIMITED_LENGTH) -> None:
        """``ModelError`` for weights that are not those of the configuration."""
        weights, config = _as_vllm_has_them(weights, config)
        tensors = TakenTensors(weights, _METHOD)
        self.max_model_len = max_model_len
        self.hidden_size = number(config, "hidden_size", _METHOD)
        self.vocab_size = number(config, "vocab_size", _METHOD)
        self.max_draft_length = number(config, "num_heads", _METHOD)
        self._token_map = self._read_token_map(tensors, config)
        self._heads = [self._read_head(tensors, config, index) for index in range(self.max_draft_length)]
        tensors.check_rest(lambda name: self._is_passed_over(name, config))
        self.device, self.dtype = self._heads[0].output.device, self._heads[0].output.dtype

    def draft(self, states: torch.Tensor, token_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The heads see no token: the newest is what the target's own head has said."""
        found = torch.stack([head.logits(states).argmax(-1) for head in self._heads[:num_tokens]], dim=1)
        return found if self._token_map is None else self._token_map[found]

    def _read_token_map(self, tensors: TakenTensors, config: Mapping[str, Any]) -> torch.Tensor | None:
        size = number(config, "truncated_vocab_size", _METHOD, self.vocab_size)
        if size == self.vocab_size:
            return None
        found = tensors.take("token_map", [size], INTEGERS).long()
        if int(found.min()) < 0 or int(found.max()) >= self.vocab_size:
            raise ModelError(f"{_METHOD}: token_map should hold ids below {self.vocab_size}")
        return found

    def _read_head(self, tensors: TakenTensors, config: Mapping[str, Any], index: int) -> MedusaHead:
        size = self.hidden_size
        layers = tuple(
            self._read_layer(tensors, config, f"blocks.{index}.layers.{layer}")
            for layer in range(number(config, "num_hidden_layers", _METHOD))
        )
        name = f"lm_heads.{0 if config.get('original_lm_head') else index}.weight"
        if self._token_map is None:
            return MedusaHead(layers, tensors.take(name, [self.vocab_size, size]))
        is_whole = tensors.num_rows(name) == self.vocab_size
        output = tensors.take(name, [self.vocab_size if is_whole else self._token_map.numel(), size])
        return MedusaHead(layers, output[self._token_map] if is_whole else output)

    def _read_layer(
        self, tensors: TakenTensors, config: Mapping[str, Any], name: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        size, has_bias = self.hidden_size, bool(config.get("medusa_fc_bias"))
        if not has_bias and tensors.has(f"{name}.bias"):
            raise ModelError(f"{_METHOD}: tensor {name}.bias is there, and config.json has no medusa_fc_bias: true")
        bias = tensors.take(f"{name}.bias", [size]) if has_bias else None
        return tensors.take(f"{name}.weight", [size, size]), bias

    def _is_passed_over(self, name: str, config: Mapping[str, Any]) -> bool:
        """Heads beyond ``num_heads``, which a configuration of the authors' leaves out, copies of the one last product,
        and the ids of a whole vocabulary.
        """
        if name == "token_map":
            return self._token_map is None
        found = _OF_HEAD.fullmatch(name)
        if found is None:
            return False
        is_copy = found[1] == "lm_heads" and bool(config.get("original_lm_head"))
        return is_copy or int(found[2]) >= self.max_draft_length


_OF_THE_AUTHORS = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def _as_vllm_has_them(weights: Weights, config: Mapping[str, Any]) -> tuple[Weights, Mapping[str, Any]]:
    """The authors' checkpoints by vLLM's names; others as they are."""
    named = {name: found for name in weights if (found := _OF_THE_AUTHORS.fullmatch(name))}
    if not named:
        return weights, config
    # Beside names with this prefix stands the model that the heads are for.
    is_beside_model = any(name.startswith("medusa_head.") for name in named)
    renamed = {} if is_beside_model else {name: weights[name] for name in weights if name not in named}
    for name, found in named.items():
        head, layer, kind = found.groups()
        of_layer = f"blocks.{head}.layers.{layer}.{kind.removeprefix('linear.')}"
        renamed[f"lm_heads.{head}.weight" if kind == "weight" else of_layer] = weights[name]
    rows = renamed.get("lm_heads.0.weight")
    if rows is None:
        have = ", ".join(sorted(weights)[:4])
        raise ModelError(f"{_METHOD}: tensor 0.N.weight, the first head's last, is missing; the folder has {have}, ...")
    if rows.dim() != 2:
        raise ModelError(f"{_METHOD}: tensor 0.N.weight should be a matrix, and its shape is {list(rows.shape)}")
    sizes = {
        "num_heads": config.get("medusa_num_heads"),
        "num_hidden_layers": config.get("medusa_num_layers"),
        "vocab_size": rows.shape[0],
        "hidden_size": rows.shape[-1],
        "medusa_fc_bias": "blocks.0.layers.0.bias" in renamed,
    }
    return renamed, sizes
