"""DFlash: drafts a block of tokens in one forward, by block diffusion over states of several of the target's layers.

Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026 (arXiv 2602.06036), and
github.com/z-lab/dflash, ``dflash/model.py``. The target's states, joined by ``fc`` and normalised, are keys and values
of every layer at their own positions. The block's queries are the newest token and a mask for each token to be drafted;
they see all of the context and each other. At each mask the target's head gives its token's logits, independent of what
is drawn at the others.

Checkpoints are z-lab's and the Speculators format's: ``fc``, ``hidden_norm``, ``norm`` and ``layers.N.`` as in Qwen3;
embedding and head are the target's where they are not beside them. Position i of the KV cache is the state of
position i.

The window of a layer with sliding attention ends with the block, for all of its queries: the last one sees just what it
was trained to see, those before it lack as many of the oldest positions as they lie before the last.

Shape letters: ``T`` tokens, ``N`` rows, ``H`` hidden size, ``F`` values that are read of a position, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.kernels.paged_attention import prepare_plan
from outrider.kv_cache import KVCacheLayout
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.draft_heads.dflash_config import DFlashConfig
from outrider.model_executor.draft_heads.draft_vocabulary import DraftVocabulary
from outrider.model_executor.draft_heads.pair_head import PlainInput
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import AttentionInputs, DeviceBatch, Residual, Weights, whole
from outrider.model_executor.layers.embedding import VocabRows
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.layers.linear_methods import UnquantizedLinear
from outrider.model_executor.layers.norm import RmsNorm
from outrider.model_executor.layers.rope import RotaryEmbedding
from outrider.model_executor.models.decoder import DecoderLayer


class DFlashHead:
    """A block drafter, its parameters uninitialised until they are loaded; a ``DraftHead`` whose pairs only store."""

    kind = "a DFlash drafter"

    def __init__(self, config: DFlashConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        layer = config.layer
        context = LayerContext(layer, layer, dtype, device, SINGLE_RANK, UnquantizedLinear)
        size = layer.hidden_size
        self._embedding = VocabRows(context)
        self._fc = Linear(context, Features.all(len(config.hidden_state_layers) * size), (Features.all(size, "fc"),))
        self._state_norm, self._norm = (RmsNorm(size, layer.rms_norm_eps, dtype=dtype, device=device) for _ in range(2))
        self._layers = [DecoderLayer(context, number) for number in range(layer.num_layers)]
        self._head = Linear(context, Features.all(size), (Features.all(config.draft_vocab_size, "lm_head"),))
        self._vocabulary = DraftVocabulary(config.draft_vocab_size, layer.vocab_size, dtype=dtype, device=device)
        self._rotary = RotaryEmbedding(
            layer.rope, head_dim=layer.head_dim, max_position=layer.max_position, device=device
        )
        self.kv_cache_layout = KVCacheLayout.of([one.attention.kv_cache_spec for one in self._layers])
        self._groups = [group for group, _ in self.kv_cache_layout.indices]
        self._attentions = [one.attention for one in self._layers if isinstance(one.attention, Attention)]

    @property
    def borrowed(self) -> tuple[str, ...]:
        """The embedding; of a drafter over the whole vocabulary, the last product too."""
        embedding = ("embed_tokens.weight",)
        return embedding if self._vocabulary.is_reduced else (*embedding, "lm_head.weight")

    def canonical(self, name: str) -> str | None:
        """Tensors as ``dflash/model.py`` saves them."""
        name = name.removeprefix("model.")
        return name if self._vocabulary.has_use_for(name) else None

    def weights(self) -> Weights:
        """All tensors, ``embed_tokens.weight`` and ``lm_head.weight`` included."""
        yield from self._embedding.weights()
        yield from self._head.weights()
        yield from self._fc.weights()
        yield "hidden_norm.weight", whole(self._state_norm.weight)
        yield "norm.weight", whole(self._norm.weight)
        for number, layer in enumerate(self._layers):
            yield from ((f"layers.{number}.{name}", target) for name, target in layer.weights())
        yield from self._vocabulary.weights()

    def finish_loading(self) -> None:
        """All tensors are there; ``ModelError`` for a ``d2t`` of another target."""
        self._vocabulary.finish_loading()
        self._head.prepare()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [T, F] to what every layer makes keys and values of [T, H]."""
        return self._state_norm(self._fc(states))

    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values of ``states`` [T, H] in all layers; returns the states, of which nothing is drawn."""
        cos_sin = self._rotary.cos_sin(batch.positions, self.dtype)
        for number, attention in enumerate(self._attentions):
            source = PlainInput(states, None, self._norm, SINGLE_RANK)
            attention.store(source, kv_cache.layer(number), cos_sin, batch.groups[self._groups[number]])
        return states, states

    def block(self, batch: DeviceBatch, kv_cache: KVCacheTensors) -> torch.Tensor:
        """Run the queries of blocks, each a row of the batch whose context is its whole block: what ``logits`` takes,
        [T, H].
        """
        groups = [self._prepared(inputs) for inputs in batch.groups]
        hidden = self._embedding.look_up(batch.token_ids)
        cos_sin = self._rotary.cos_sin(batch.positions, self.dtype)
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            hidden, delta = layer(hidden, delta, kv_cache.layer(number), cos_sin, groups[self._groups[number]])
        return Residual(hidden, delta, self._norm, SINGLE_RANK).normed()[1]

    def _prepared(self, inputs: AttentionInputs) -> AttentionInputs:
        layer = self.config.layer
        plan = prepare_plan(
            inputs.plan,
            num_tokens=len(inputs.slots),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=self.dtype,
        )
        return replace(inputs, plan=plan)

    def queries(self, last_token_id: int, num_drafts: int) -> Sequence[int]:
        """Token ids of a block that drafts this many tokens."""
        return [last_token_id, *[self.config.mask_token_id] * num_drafts]

    def empty_logits(self, num_rows: int) -> torch.Tensor | None:
        """[num_rows, V] logits of nothing, for ``logits`` to write to; None where it needs no such memory."""
        return self._vocabulary.empty_logits(num_rows)

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, H] to logits [N, V] float32 of the target's ids; ``out`` [N, V] is part of what ``empty_logits`` gave."""
        return self._vocabulary.logits(self._head(normed), out).float()
