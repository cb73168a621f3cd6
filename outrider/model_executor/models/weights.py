"""Which tensor of a checkpoint goes where in a ``Decoder``.

Owns the Hugging Face names of the supported architectures, the fusing of their weights and which part of each a rank
holds. Refuses to know files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.decoder import Attention, Decoder, DecoderLayer, Mlp
from outrider.model_executor.models.linear import Linear


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where one tensor of a checkpoint is copied to."""

    destination: torch.Tensor | None
    """A view into a parameter; broadcasts from the part. None: the tensor is another rank's."""
    shape: tuple[int, ...]
    """What the checkpoint's tensor must have."""
    linear: Linear | None = None
    """The layer to prepare once all of its weight is there."""
    part: tuple[slice, ...] | None = None
    """What of the tensor is copied; None: all."""

    @property
    def num_values(self) -> int:
        """Values that are read."""
        if self.destination is None:
            return 0
        parts = self.part or ()
        sizes = [len(range(size)[part]) for size, part in zip(self.shape, parts, strict=False)]
        return math.prod([*sizes, *self.shape[len(sizes) :]])


def weight_targets(decoder: Decoder) -> dict[str, WeightTarget]:
    """Every tensor that a checkpoint of this model must have."""
    config, own = decoder.config, decoder.shard.vocab(decoder.config)
    vocab_shape, rows = (config.vocab_size, config.hidden_size), (slice(own.start, own.stop),)
    targets = {
        "model.embed_tokens.weight": WeightTarget(decoder.embedding, vocab_shape, part=rows),
        "model.norm.weight": _whole(decoder.norm.weight),
    }
    if not config.tied_embeddings:
        head = decoder.head.weight[: len(own)]
        targets["lm_head.weight"] = WeightTarget(head, vocab_shape, decoder.head, rows)
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        targets.update((prefix + name, target) for name, target in _layer_targets(layer, decoder))
    return targets


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may have this tensor though nothing is done with it."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


def checkpoint_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a checkpoint of this model must have; takes no memory for any."""
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    layer = list(_layer_shapes(config))
    for index in range(config.num_layers):
        yield from ((f"model.layers.{index}.{name}", shape) for name, shape in layer)


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    yield from (("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,)))
    if config.qk_norm:
        yield from (("self_attn.q_norm.weight", (size,)), ("self_attn.k_norm.weight", (size,)))
    for name, rows, columns, has_bias in (
        ("self_attn.q_proj", queries, hidden, config.qkv_bias),
        ("self_attn.k_proj", keys, hidden, config.qkv_bias),
        ("self_attn.v_proj", keys, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, queries, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)


def _layer_targets(layer: DecoderLayer, decoder: Decoder) -> Iterator[tuple[str, WeightTarget]]:
    yield "input_layernorm.weight", _whole(layer.attention_norm.weight)
    yield "post_attention_layernorm.weight", _whole(layer.mlp_norm.weight)
    yield from _attention_targets(layer.attention, decoder)
    yield from _mlp_targets(layer.mlp, decoder)


def _attention_targets(attention: Attention, decoder: Decoder) -> Iterator[tuple[str, WeightTarget]]:
    config, size = decoder.config, decoder.config.head_dim
    query_rows = _scaled(decoder.shard.heads(config), size)
    key_rows = _scaled(decoder.shard.kv_heads(config), size)
    projections = {
        "q_proj": (config.num_heads * size, query_rows),
        "k_proj": (config.num_kv_heads * size, key_rows),
        "v_proj": (config.num_kv_heads * size, key_rows),
    }
    yield from _by_output("self_attn.", attention.qkv, projections, config.hidden_size)
    shape = (config.hidden_size, config.num_heads * size)
    yield from _by_input("self_attn.o_proj", attention.output, shape, query_rows, has_bias=config.output_bias)
    if attention.qk_norm is not None:
        norm_shape, num_heads = (size,), decoder.part.num_heads
        yield "self_attn.q_norm.weight", WeightTarget(attention.qk_norm[:num_heads], norm_shape)
        yield "self_attn.k_norm.weight", WeightTarget(attention.qk_norm[num_heads:], norm_shape)


def _mlp_targets(mlp: Mlp, decoder: Decoder) -> Iterator[tuple[str, WeightTarget]]:
    config, own = decoder.config, decoder.shard.inner(decoder.config)
    inner, hidden = config.intermediate_size, config.hidden_size
    yield from _by_output("mlp.", mlp.gate_up, {"gate_proj": (inner, own), "up_proj": (inner, own)}, hidden)
    yield from _by_input("mlp.down_proj", mlp.down, (hidden, inner), own, has_bias=config.mlp_bias)


def _by_output(
    prefix: str, linear: Linear, rows: dict[str, tuple[int, range]], num_columns: int
) -> Iterator[tuple[str, WeightTarget]]:
    """The rank's rows of one projection after the other along the output rows of one layer."""
    start = 0
    for name, (num_rows, own) in rows.items():
        end, part = start + len(own), (slice(own.start, own.stop),)
        yield f"{prefix}{name}.weight", WeightTarget(linear.weight[start:end], (num_rows, num_columns), linear, part)
        if linear.bias is not None:
            yield f"{prefix}{name}.bias", WeightTarget(linear.bias[start:end], (num_rows,), None, part)
        start = end


def _by_input(
    name: str, linear: Linear, shape: tuple[int, int], own: range, *, has_bias: bool
) -> Iterator[tuple[str, WeightTarget]]:
    """The rank's columns of one projection, and its bias, which one rank adds."""
    part = (slice(None), slice(own.start, own.stop))
    yield f"{name}.weight", WeightTarget(linear.weight, shape, linear, part)
    if has_bias:
        yield f"{name}.bias", WeightTarget(linear.bias, shape[:1])


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)


def _whole(parameter: torch.Tensor) -> WeightTarget:
    return WeightTarget(parameter, tuple(parameter.shape))
