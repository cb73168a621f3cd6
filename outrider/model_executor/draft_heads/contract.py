"""Draft head contract: what the runner, the executor and the loader need of any head that drafts token by token.

A head works on pairs: position i stands for token i + 1 beside the target's hidden state of position i, and gives the
distribution of token i + 2. Where the target's state is not known yet, the head's own takes its place.

Shape letters: ``T`` tokens, ``N`` rows that get logits, ``H`` hidden size of the head, ``F`` values that it reads of a
position, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.kv_cache import KVCacheLayout
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch, Weights
from outrider.model_executor.models.config import ModelConfig


class HeadConfig(Protocol):
    """Configuration that every head has."""

    @property
    def layer(self) -> ModelConfig:
        """Decoder layer; ``vocab_size`` and ``max_position`` are the target's."""
        ...

    @property
    def hidden_state_layers(self) -> tuple[int, ...]:
        """Layers of the target whose states it reads, side by side."""
        ...

    @property
    def target_hidden_size(self) -> int:
        """Size of one layer's state."""
        ...


class DraftHead(Protocol):
    """One head on its device."""

    @property
    def config(self) -> HeadConfig:
        """Sizes, and what it reads."""
        ...

    @property
    def kind(self) -> str:
        """Name in errors, with its article."""
        ...

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Tensors that are the target's where a checkpoint lacks them: ``embed_tokens.weight``, ``lm_head.weight``."""
        ...

    dtype: torch.dtype
    device: torch.device
    kv_cache_layout: KVCacheLayout

    def canonical(self, name: str) -> str | None:
        """Name in ``weights`` of the tensor ``name`` of a published checkpoint; None: it is of no use here."""
        ...

    def weights(self) -> Weights:
        """Tensors of the head, the borrowed ones too."""
        ...

    def finish_loading(self) -> None:
        """All tensors are there; ``ModelError`` where what they hold cannot be."""
        ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [T, F] to what the layer reads [T, H]."""
        ...

    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run pairs of tokens and ``states`` [T, H], which may be overwritten; the next states, and what ``logits``
        takes, [T, H] each.
        """
        ...

    def empty_logits(self, num_rows: int) -> torch.Tensor | None:
        """[num_rows, V] logits of nothing, for ``logits`` to write to again and again; None where it needs no such
        memory.
        """
        ...

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, H] to logits [N, V] of the target's ids, as computed; ``out`` is part of what ``empty_logits`` gave."""
        ...
