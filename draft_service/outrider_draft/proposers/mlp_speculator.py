"""Proposals by IBM's MLP speculator: a small recurrent network over the target's last hidden state and drafted tokens.

Wertheimer et al., 2024 (arXiv 2404.19124). Stage i adds the embedding of the token drafted last to a projection of the
state, normalises, and a head of its own gives the next token. Checkpoints are those of ibm-fms and ibm-granite:
``speculator.emb.I.weight``, ``proj.I.weight``, ``ln.I.weight`` and ``.bias``, ``head.I.weight``; with ``tie_weights``
the stages share them, but for the first projection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from outrider.config import DraftSettings
from outrider.model_executor.device_setup import device_facts
from outrider_draft.proposers.base import UNLIMITED_LENGTH
from outrider_draft.proposers.registry import LoadHooks, ServedProposer, without_kv
from outrider_draft.proposers.state_heads import StateHeadProposer, TakenTensors, Weights, number

_METHOD = "mlp_speculator"
_EPSILON = 1e-6
"""Epsilon of the published model's norm."""
_OF_STAGE = re.compile(r"(?:(?:emb|proj|ln|head)\.(\d{1,9})\.weight|ln\.(\d{1,9})\.bias)")


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """An MLP speculator, served."""
    proposer, name = MlpSpeculatorProposer.load(settings), Path(settings.model or "").resolve().name
    return without_kv(proposer, settings, name, device=device_facts(proposer.device))


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of the speculator, which gives one token."""

    embedding: torch.Tensor  # [V, D]
    projection: torch.Tensor  # [D, H], of later stages [D, D]
    norm_weight: torch.Tensor  # [D]
    norm_bias: torch.Tensor  # [D]
    head: torch.Tensor  # [V, D]


class MlpSpeculatorProposer(StateHeadProposer):
    """Proposes the likeliest token of each stage."""

    prefix = "speculator."

    def __init__(self, weights: Weights, config: Mapping[str, Any], *, max_model_len: int = UNLIMITED_LENGTH) -> None:
        """``ModelError`` for weights that are not those of the configuration."""
        tensors = TakenTensors(weights, _METHOD)
        self.max_model_len = max_model_len
        self.hidden_size = number(config, "emb_dim", _METHOD)
        self.vocab_size = number(config, "vocab_size", _METHOD)
        self.max_draft_length = number(config, "n_predict", _METHOD)
        self._inner = (
            number(config, "inner_dim", _METHOD, self.hidden_size) if config.get("inner_dim") else self.hidden_size
        )
        self._scales_input = bool(config.get("scale_input"))
        is_tied = bool(config.get("tie_weights"))
        self._stages = [self._read_stage(tensors, index, is_tied=is_tied) for index in range(self.max_draft_length)]
        # A file of tied stages may have what they share once for each.
        tensors.check_rest(lambda name: is_tied and _is_of_stage(name, self.max_draft_length))
        state_weight = 0.5 ** (0.5 / self.max_draft_length)
        embedding_weight = math.sqrt((1 - state_weight**2) * (self._inner / 2))
        self._mixing = embedding_weight / state_weight
        """Weight of an embedding to a state of weight 1; their sum is normalised."""
        self.device, self.dtype = self._stages[0].head.device, self._stages[0].head.dtype

    def draft(self, states: torch.Tensor, token_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """One stage after the other."""
        if self._scales_input:
            states = _normalised(states) / math.sqrt(2)
        drafted = []
        for stage in self._stages[:num_tokens]:
            mixed = F.linear(states, stage.projection) + self._mixing * stage.embedding[token_ids]
            states = F.gelu(stage.norm_weight * _normalised(mixed) + stage.norm_bias)
            token_ids = F.linear(states, stage.head).argmax(-1)
            drafted.append(token_ids)
        return torch.stack(drafted, dim=1)

    def _read_stage(self, tensors: TakenTensors, index: int, *, is_tied: bool) -> Stage:
        shared = 0 if is_tied else index
        projection = min(index, 1) if is_tied else index
        width = self.hidden_size if index == 0 else self._inner
        vocabulary, inner = self.vocab_size, self._inner
        return Stage(
            tensors.take(f"emb.{shared}.weight", [vocabulary, inner]),
            tensors.take(f"proj.{projection}.weight", [inner, width]),
            tensors.take(f"ln.{shared}.weight", [inner]),
            tensors.take(f"ln.{shared}.bias", [inner]),
            tensors.take(f"head.{shared}.weight", [vocabulary, inner]),
        )


def _is_of_stage(name: str, num_stages: int) -> bool:
    found = _OF_STAGE.fullmatch(name)
    return found is not None and int(found[1] or found[2]) < num_stages


def _normalised(states: torch.Tensor) -> torch.Tensor:
    """Divided by the root of the mean square."""
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + _EPSILON)
