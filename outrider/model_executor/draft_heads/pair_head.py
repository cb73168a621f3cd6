"""Base of EAGLE and MTP heads: one decoder layer over pairs, between the target's embedding and its head.

Owns the layer's order of computation; what goes into the layer, and what comes after it, is each head's.

Shape letters: ``T`` tokens, ``N`` rows, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from outrider.kernels.gemv import NormedInput
from outrider.kv_cache import KVCacheLayout
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import DeviceBatch, Residual, Weights
from outrider.model_executor.layers.embedding import VocabRows
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.layers.linear_methods import UnquantizedLinear, linear_method_of
from outrider.model_executor.layers.norm import RmsNorm
from outrider.model_executor.layers.rope import RotaryEmbedding
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.decoder import DecoderLayer
from outrider.types import LAST_HIDDEN_STATE


@dataclass(frozen=True, slots=True)
class PairHeadConfig:
    """A head over the last hidden state, as large as the target's."""

    layer: ModelConfig
    """Decoder layer; ``vocab_size`` and ``max_position`` are the target's."""
    has_fc_bias: bool = False
    """True if the product that joins embedding and state has a bias."""

    @property
    def hidden_state_layers(self) -> tuple[int, ...]:
        """Layers whose states the head reads: those that the target's head reads."""
        return (LAST_HIDDEN_STATE,)

    @property
    def target_hidden_size(self) -> int:
        """Values of a state."""
        return self.layer.hidden_size


class PairHead(ABC):
    """A head, its parameters uninitialised until they are loaded. Embedding and head are the target's, or copies."""

    kind: str
    borrowed = ("embed_tokens.weight", "lm_head.weight")

    def __init__(self, config: PairHeadConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        layer = config.layer
        make_method = linear_method_of(layer.quantization)
        self._context = LayerContext(layer, layer, dtype, device, SINGLE_RANK, make_method)
        hidden = Features.all(layer.hidden_size)
        self._embedding = VocabRows(self._context)
        self._layer = DecoderLayer(self._context, 0)
        output = (Features.all(layer.vocab_size, "lm_head"),)
        self._head = Linear(self._context, hidden, output, make_method=UnquantizedLinear)
        self._rotary = RotaryEmbedding(
            layer.rope, head_dim=layer.head_dim, max_position=layer.max_position, device=device
        )
        self.kv_cache_layout = KVCacheLayout.of([self._layer.attention.kv_cache_spec])

    @abstractmethod
    def canonical(self, name: str) -> str | None:
        """Name in ``weights`` of the tensor ``name`` of a published checkpoint; None: it is of no use here."""

    @abstractmethod
    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run pairs of tokens and ``states`` [T, H]; the next states, and what ``logits`` takes, [T, H] each."""

    def weights(self) -> Weights:
        """The tensors that all such heads have."""
        yield from self._embedding.weights()
        yield from self._head.weights()
        yield from self._layer.weights()

    def finish_loading(self) -> None:
        """All tensors are there."""
        self._head.prepare()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [T, H] are read as they are."""
        return states

    def empty_logits(self, num_rows: int) -> torch.Tensor | None:
        """The product has memory of its own."""
        return None

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, H] to logits [N, V]."""
        return self._head(normed)[:, : self.config.layer.vocab_size]

    def _run_layer(
        self, stream: torch.Tensor, batch: DeviceBatch, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream [T, H] after attention, and what the feed-forward block adds to it."""
        cos_sin = self._rotary.cos_sin(batch.positions, self.dtype)
        return self._layer(stream, None, kv_cache.layer(0), cos_sin, batch.groups[0])

    def _make_norm(self) -> RmsNorm:
        layer = self.config.layer
        return RmsNorm(
            layer.hidden_size, layer.rms_norm_eps, dtype=self.dtype, device=self.device,
            offset=layer.variant.norm_offset,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlainInput(Residual):
    """Input of a block that is not normalised."""

    def normed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the stream and what was to be added, twice."""
        if self.delta is None:
            return self.hidden, self.hidden
        delta = self.delta if self.delta.dim() == self.hidden.dim() else self.delta.sum(0)
        hidden = (self.hidden + delta).to(self.hidden.dtype)
        return hidden, hidden

    def unnormed(self) -> NormedInput | None:
        """No kernel leaves out the norm."""
        return None
