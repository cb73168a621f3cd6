"""DFlash: drafts a block of tokens in one forward, by block diffusion over states of several of the target's layers.

Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026 (arXiv 2602.06036), and
github.com/z-lab/dflash, ``dflash/model.py``. The target's states, joined by ``fc`` and normalised, are keys and values
of every layer at their own positions. The block's queries are the newest token and a mask for each token to be drafted;
they see all of the context and each other. At each mask the target's head gives its token's logits, independent of what
is drawn at the others.

Checkpoints are z-lab's and the Speculators format's: ``fc``, ``hidden_norm``, ``norm`` and ``layers.N.`` as in Qwen3;
embedding and head are the target's where they are not beside them. Position i of the KV cache is the state of
position i.

Shape letters: ``T`` tokens, ``N`` rows, ``H`` hidden size, ``F`` values that are read of a position, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kv_cache import KVCacheLayout
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.draft_heads.dflash_config import DFlashConfig
from outrider.model_executor.draft_heads.pair_head import PlainInput
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import DeviceBatch, Residual, Weights, whole
from outrider.model_executor.layers.embedding import VocabRows
from outrider.model_executor.layers.linear import Features, Linear
from outrider.model_executor.layers.linear_methods import LINEAR_METHODS
from outrider.model_executor.layers.norm import RmsNorm
from outrider.model_executor.layers.rope import RotaryEmbedding
from outrider.model_executor.models.decoder import DecoderLayer


class DFlashHead:
    """A block drafter, its parameters uninitialised until they are loaded; a ``DraftHead`` whose pairs only store."""

    kind = "a DFlash drafter"
    borrowed = ("embed_tokens.weight", "lm_head.weight")

    def __init__(self, config: DFlashConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        layer = config.layer
        context = LayerContext(layer, layer, dtype, device, SINGLE_RANK, LINEAR_METHODS[None])
        size = layer.hidden_size
        self._embedding = VocabRows(context)
        self._fc = Linear(context, Features.all(len(config.hidden_state_layers) * size), (Features.all(size, "fc"),))
        self._state_norm, self._norm = (RmsNorm(size, layer.rms_norm_eps, dtype=dtype, device=device) for _ in range(2))
        self._layers = [DecoderLayer(context, number) for number in range(layer.num_layers)]
        self._head = Linear(context, Features.all(size), (Features.all(layer.vocab_size, "lm_head"),))
        self._rotary = RotaryEmbedding(
            layer.rope, head_dim=layer.head_dim, max_position=layer.max_position, device=device
        )
        self.kv_cache_layout = KVCacheLayout.of([one.attention.kv_cache_spec for one in self._layers])

    def canonical(self, name: str) -> str | None:
        """As ``dflash/model.py`` saves them."""
        return name.removeprefix("model.")

    def weights(self) -> Weights:
        """All tensors, ``embed_tokens.weight`` and ``lm_head.weight`` included."""
        yield from self._embedding.weights()
        yield from self._head.weights()
        yield from self._fc.weights()
        yield "hidden_norm.weight", whole(self._state_norm.weight)
        yield "norm.weight", whole(self._norm.weight)
        for number, layer in enumerate(self._layers):
            yield from ((f"layers.{number}.{name}", target) for name, target in layer.weights())

    def finish_loading(self) -> None:
        """All tensors are there."""
        self._head.prepare()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [T, F] to what every layer makes keys and values of [T, H]."""
        return self._state_norm(self._fc(states))

    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values of ``states`` [T, H] in all layers; returns the states, of which nothing is drawn."""
        angles = self._rotary.angles(batch.positions, self.dtype)
        for number, layer in enumerate(self._layers):
            source = PlainInput(states, None, self._norm, SINGLE_RANK)
            layer.attention.store(source, kv_cache.layer(number), angles, batch.groups[0])
        return states, states

    def block(self, batch: DeviceBatch, kv_cache: KVCacheTensors) -> torch.Tensor:
        """Run the queries of blocks, each a row of the batch whose context is its whole block: what ``logits`` takes,
        [T, H].
        """
        hidden = self._embedding.look_up(batch.token_ids)
        angles = self._rotary.angles(batch.positions, self.dtype)
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            hidden, delta = layer(hidden, delta, kv_cache.layer(number), angles, batch.groups[0])
        return Residual(hidden, delta, self._norm, SINGLE_RANK).normed()[1]

    def queries(self, last_token_id: int, num_drafts: int) -> Sequence[int]:
        """Token ids of a block that drafts so many tokens."""
        return [last_token_id, *[self.config.mask_token_id] * num_drafts]

    def empty_logits(self, num_rows: int) -> torch.Tensor | None:
        """The product has memory of its own."""
        return None

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, H] to logits [N, V] float32."""
        return self._head(normed)[:, : self.config.layer.vocab_size].float()
