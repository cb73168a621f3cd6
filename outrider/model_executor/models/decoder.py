"""Decoder model: token embedding, layers of attention and feed-forward, norm and head, over a paged KV cache.

Owns the order of computation. What families do differently is read from ``ModelConfig`` and chosen by the family
(``families``); how weights are kept and which kernels compute is the layers' to choose.

Of several ranks that share a model each has a decoder of its part; what a block's last product gives is then a part of
a sum, and logits are of a part of the vocabulary; a ``Communicator`` puts them together. What a block gives is added to
the residual stream by the norm that comes next, so that both are one pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.kernels.paged_attention import prepare_plan
from outrider.kernels.rope_and_cache import CosSin
from outrider.kv_cache import KVCacheLayout, KVCacheSpec
from outrider.model_executor.distributed.communicator import SINGLE_RANK, Communicator, gather_by_sum
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import (
    AttentionInputs,
    DeviceBatch,
    KVScaled,
    Residual,
    StateInputs,
    TokenMixer,
    Weights,
    whole,
)
from outrider.model_executor.layers.embedding import VocabRows
from outrider.model_executor.layers.gated_attention import GatedAttention
from outrider.model_executor.layers.gated_delta_net import GatedDeltaNet
from outrider.model_executor.layers.layer_inputs import LayerInputBlock, LayerInputs
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.layers.linear_methods import linear_method_of
from outrider.model_executor.layers.norm import RmsNorm
from outrider.model_executor.layers.rope import RotaryEmbedding
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.families import family_of
from outrider.types import LAST_HIDDEN_STATE


class DecoderLayer:
    """Attention and feed-forward, each added to the residual stream; ``LayerNorms`` says what is normalised."""

    def __init__(self, context: LayerContext, layer: int) -> None:
        context, variant = context.of_layer(layer), context.config.variant
        self._names, self._multiplier = variant.norms, variant.residual_multiplier
        self._communicator = context.communicator
        # What is normalized before it is added is the sum of all ranks.
        self._adding = SINGLE_RANK if variant.norms.has_after else context.communicator
        self.attention_norm = _optional_norm(context, self._names.before_attention)
        self.attention: TokenMixer = _make_mixer(context, layer)
        self.attention_output_norm = _optional_norm(context, self._names.after_attention)
        self.feed_forward_norm = _optional_norm(context, self._names.before_feed_forward)
        self.feed_forward = family_of(context.config.architecture).feed_forward(context, layer)
        self.feed_forward_output_norm = _optional_norm(context, self._names.after_feed_forward)
        self.input_block = LayerInputBlock(context, layer) if variant.layer_input_size else None
        self.scale = torch.empty(1, dtype=context.dtype, device=context.device) if variant.has_layer_scale else None

    def __call__(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        cache: Any,  # noqa: ANN401 - what the mixer keeps of earlier tokens
        cos_sin: CosSin,
        inputs: Any,  # noqa: ANN401 - the mixer's
        *,
        state: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add ``delta``, what the layer before gave, and the attention's to ``hidden`` [T, hidden], which is
        overwritten or left alone; returns the sum and what is to be added next. The stream that the layer reads is
        copied to ``state`` [T, hidden]. ``features`` [T, P] are the layer's own of each token.
        """
        source = Residual(hidden, delta, self.attention_norm, self._adding)
        hidden, delta = self.attention(source, cache, cos_sin, inputs)
        if state is not None:
            state.copy_(hidden)  # which now holds the sum, and to which the second block may add
        delta = self._to_add(delta, self.attention_output_norm)
        hidden, delta = self.feed_forward(Residual(hidden, delta, self.feed_forward_norm, self._adding))
        delta = self._to_add(delta, self.feed_forward_output_norm)
        if self.input_block is not None and features is not None:
            hidden = hidden.add_(delta)
            delta = self.input_block(hidden, features)
        return (hidden, delta) if self.scale is None else (hidden.add_(delta).mul_(self.scale), None)

    @property
    def norms(self) -> dict[str, RmsNorm]:
        """The layer's norms by their names in the checkpoint."""
        names, norms = self._names, {}
        for name, norm in (
            (names.before_attention, self.attention_norm),
            (names.after_attention, self.attention_output_norm),
            (names.before_feed_forward, self.feed_forward_norm),
            (names.after_feed_forward, self.feed_forward_output_norm),
        ):
            if name is not None and norm is not None:
                norms[name] = norm
        return norms

    def weights(self) -> Weights:
        """The layer's tensors."""
        for name, norm in self.norms.items():
            yield f"{name}.weight", norm.target()
        yield from _within(self.attention.weight_prefix, self.attention.weights())
        yield from self.feed_forward.weights()
        if self.input_block is not None:
            yield from self.input_block.weights()
        if self.scale is not None:
            yield "layer_scalar", whole(self.scale)

    def _to_add(self, delta: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        """Addend to the residual stream for a block's output [T, hidden], or partial sums of it."""
        if norm is not None:
            delta = norm(self._communicator.all_reduce(delta))
        return delta if self._multiplier == 1.0 else delta.mul_(self._multiplier)


class Decoder:
    """A whole model, or a rank's part of it, its parameters uninitialised until they are loaded."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        communicator: Communicator = SINGLE_RANK,
        batch_invariant: bool = False,
    ) -> None:
        """``batch_invariant``: a token's results do not depend on what is computed with it; see
        ``outrider.kernels.invariance`` for where that is possible.
        """
        self.config = config
        """The whole model's."""
        self.shard = communicator.shard
        self.part = communicator.shard.part_of(config)
        """Part of the model that is computed here."""
        self.dtype = dtype
        self.device = device
        self.communicator = communicator
        """Communicator of the ranks that share the model."""
        self.batch_invariant = batch_invariant
        context = LayerContext(
            config, self.part, dtype, device, communicator, linear_method_of(config.quantization), batch_invariant
        )
        self._vocab = VocabRows(context)
        self._layer_inputs = LayerInputs(context) if config.variant.layer_input_size else None
        self.layers = [DecoderLayer(context, layer) for layer in range(config.num_layers)]
        self.norm = _make_norm(context)
        self.head = self._make_head(context)
        ropes = [(config.rope_of(layer), config.of_layer(layer).head_dim) for layer in range(config.num_layers)]
        distinct = list(dict.fromkeys(ropes))
        self._rotaries = [
            RotaryEmbedding(rope, head_dim=size, max_position=config.max_position, device=device)
            for rope, size in distinct
        ]
        self._rotary_of = [distinct.index(rope) for rope in ropes]
        self._embedding_multiplier = float(torch.tensor(config.variant.embedding_multiplier, dtype=dtype))
        sources = [config.kv_source(layer) for layer in range(config.num_layers)]
        cached = sorted(set(sources))
        self.kv_cache_layout = KVCacheLayout.of([self.layers[layer].attention.kv_cache_spec for layer in cached])
        self.cache_layers = [cached.index(source) for source in sources]
        """Index of the cache layer that each layer reads."""
        groups = [group for group, _ in self.kv_cache_layout.indices]
        self._groups = [groups[layer] for layer in self.cache_layers]

    @property
    def scaled_layers(self) -> dict[int, KVScaled]:
        """Layers with keys and values, by number, which an FP8 cache has scales for."""
        mixers = enumerate(layer.attention for layer in self.layers)
        return {number: mixer for number, mixer in mixers if isinstance(mixer, Attention)}

    def weights(self) -> Weights:
        """Every tensor that a checkpoint of this model must have."""
        yield from _within("model.", self._vocab.weights())
        if self._layer_inputs is not None:
            yield from _within("model.", self._layer_inputs.weights())
        yield "model.norm.weight", self.norm.target()
        if not self.config.tied_embeddings:
            yield from self.head.weights()
        for index, layer in enumerate(self.layers):
            yield from _within(f"model.layers.{index}.", layer.weights())

    def __call__(self, batch: DeviceBatch, kv_cache: KVCacheTensors) -> torch.Tensor:
        """Run the batch over the cache; returns logits [N, V] of ``batch.logit_indices``."""
        return self.logits(self.hidden_states(batch, kv_cache), batch.logit_indices)

    def run(
        self, batch: DeviceBatch, kv_cache: KVCacheTensors, layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, V] of ``batch.logit_indices``, and the states of ``layers`` as ``layer_states`` has them."""
        hidden, states = self.layer_states(batch, kv_cache, layers)
        return self.logits(hidden, batch.logit_indices), states

    def hidden_states(self, batch: DeviceBatch, kv_cache: KVCacheTensors) -> torch.Tensor:
        """All layers and the last normalisation: [T, hidden]."""
        return self.layer_states(batch, kv_cache, ())[0]

    def layer_states(
        self, batch: DeviceBatch, kv_cache: KVCacheTensors, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden_states``, and beside them the hidden states of ``layers``, side by side: [T, F].

        Layer i is the residual stream after i layers, 0 the embedding, ``LAST_HIDDEN_STATE`` the normalised end. Every
        rank has them whole. All ranks of a model call this with the same layers. The first result does not depend on
        ``layers``, bit for bit: each state costs one copy of what is computed anyway.
        """
        groups: list[AttentionInputs | StateInputs] = [
            self._prepared(inputs, group.spec)
            for inputs, group in zip(batch.groups, self.kv_cache_layout.groups, strict=True)
        ]
        if batch.states is not None:
            groups.append(batch.states)
        hidden = self._embedded(batch.token_ids)
        cos_sin = [rotary.cos_sin(batch.positions, self.dtype) for rotary in self._rotaries]
        features = None if self._layer_inputs is None else self._layer_inputs(batch.token_ids, hidden)
        size = self.config.hidden_size
        states = torch.empty(hidden.shape[0], size * len(layers), dtype=self.dtype, device=self.device)
        places = {layer: states[:, i * size : (i + 1) * size] for i, layer in enumerate(layers)}
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self.layers):
            hidden, delta = layer(
                hidden, delta, kv_cache.layer(self.cache_layers[number]), cos_sin[self._rotary_of[number]],
                groups[self._groups[number]], state=places.get(number),
                features=None if features is None else features[number],
            )  # fmt: skip
        adding = SINGLE_RANK if self.config.variant.norms.has_after else self.communicator
        total, last = Residual(hidden, delta, self.norm, adding).normed()
        if (place := places.get(len(self.layers))) is not None:
            place.copy_(total)
        if (place := places.get(LAST_HIDDEN_STATE)) is not None:
            place.copy_(last)
        return last, states

    def logits(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of the chosen rows of ``hidden``, as computed: of the weights' type, in memory of their own."""
        if not indices.numel():
            return torch.empty(0, self.config.vocab_size, dtype=self.dtype, device=self.device)
        return self.head_logits(hidden, indices)

    def head_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """Logits [N, V] of the model's own type of the chosen rows of ``hidden``, of all where ``indices`` is None."""
        return self._of_vocabulary(self.communicator.all_gather(self._own_logits(hidden, indices)))

    def draft_logits(self, batch: DeviceBatch, kv_cache: KVCacheTensors, indices: torch.Tensor | None) -> torch.Tensor:
        """A step of a draft loop: logits [N, V] of the chosen rows of the batch, of all where ``indices`` is None.
        Every rank has the same ones, bit for bit.
        """
        hidden = self.hidden_states(batch, kv_cache)
        return self._of_vocabulary(gather_by_sum(self.communicator, self._own_logits(hidden, indices)))

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` [T] to [T, hidden]."""
        hidden = self.communicator.all_reduce(self._vocab.look_up(token_ids))
        multiplier = self._embedding_multiplier
        return hidden if multiplier == 1.0 else hidden.mul_(multiplier)

    def _own_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """Logits of the rank's rows of the vocabulary, [N, C]."""
        logits = self.head(hidden if indices is None else hidden.index_select(0, indices))
        divisor, cap = self.config.variant.logits_divisor, self.config.variant.logits_softcap
        if divisor != 1.0:
            logits = logits.div_(divisor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _of_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Less those that only round ranks' parts up: [N, size * C] to [N, V]."""
        return logits[:, : self.config.vocab_size].contiguous()

    def _prepared(self, inputs: AttentionInputs, spec: KVCacheSpec) -> AttentionInputs:
        inputs = inputs.mapped()
        plan = prepare_plan(
            inputs.plan,
            num_tokens=len(inputs.slots),
            num_heads=self.part.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.dtype,
        )
        return replace(inputs, plan=plan)

    def _make_head(self, context: LayerContext) -> Linear:
        config, shard = context.config, self.shard
        return Linear(
            context,
            Features.all(config.hidden_size),
            (Features(config.vocab_size, shard.vocab(config), "lm_head"),),
            num_rows=shard.vocab_rows(config),
            tied_to=self._vocab.rows if config.tied_embeddings else None,
        )


def _make_mixer(context: LayerContext, layer: int) -> TokenMixer:
    if context.config.is_recurrent(layer):
        return GatedDeltaNet(context, layer)
    return (GatedAttention if context.config.variant.has_output_gate else Attention)(context, layer)


def _make_norm(context: LayerContext) -> RmsNorm:
    config = context.config
    return RmsNorm(
        config.hidden_size, config.rms_norm_eps, dtype=context.dtype, device=context.device,
        offset=config.variant.norm_offset,
    )  # fmt: skip


def _optional_norm(context: LayerContext, name: str | None) -> RmsNorm | None:
    return None if name is None else _make_norm(context)


def _within(prefix: str, weights: Weights) -> Weights:
    """The same tensors, named from one level further out."""
    return ((prefix + name, target) for name, target in weights)
