"""Which tensor of a checkpoint goes where in a ``Decoder``.

Owns the Hugging Face names of the supported architectures and the fusing of their weights. Refuses to know files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from outrider.engine.models.decoder import Attention, Decoder, DecoderLayer, Mlp
from outrider.engine.models.linear import Linear


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where one tensor of a checkpoint is copied to."""

    destination: torch.Tensor
    """A view into a parameter; broadcasts from ``shape``."""
    shape: tuple[int, ...]
    """What the checkpoint's tensor must have."""
    linear: Linear | None = None
    """The layer to prepare once all of its weight is there."""


def weight_targets(decoder: Decoder) -> dict[str, WeightTarget]:
    """Every tensor that a checkpoint of this model must have."""
    targets = {
        "model.embed_tokens.weight": _whole(decoder.embedding),
        "model.norm.weight": _whole(decoder.norm.weight),
    }
    if not decoder.config.tied_embeddings:
        targets["lm_head.weight"] = _whole(decoder.head.weight, decoder.head)
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        targets.update((prefix + name, target) for name, target in _layer_targets(layer, decoder))
    return targets


def is_ignored(name: str, decoder: Decoder) -> bool:
    """Whether a checkpoint may have this tensor though nothing is done with it."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and decoder.config.tied_embeddings)


def _layer_targets(layer: DecoderLayer, decoder: Decoder) -> Iterator[tuple[str, WeightTarget]]:
    yield "input_layernorm.weight", _whole(layer.attention_norm.weight)
    yield "post_attention_layernorm.weight", _whole(layer.mlp_norm.weight)
    yield from _attention_targets(layer.attention, decoder)
    yield from _mlp_targets(layer.mlp, decoder)


def _attention_targets(attention: Attention, decoder: Decoder) -> Iterator[tuple[str, WeightTarget]]:
    config = decoder.config
    query_rows, key_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {"q_proj": query_rows, "k_proj": key_rows, "v_proj": key_rows}
    yield from _fused("self_attn.", attention.qkv, projections)
    yield from _fused("self_attn.", attention.output, {"o_proj": config.hidden_size})
    if attention.qk_norm is not None:
        shape = (config.head_dim,)
        yield "self_attn.q_norm.weight", WeightTarget(attention.qk_norm[: config.num_heads], shape)
        yield "self_attn.k_norm.weight", WeightTarget(attention.qk_norm[config.num_heads :], shape)


def _mlp_targets(mlp: Mlp, decoder: Decoder) -> Iterator[tuple[str, WeightTarget]]:
    inner = decoder.config.intermediate_size
    yield from _fused("mlp.", mlp.gate_up, {"gate_proj": inner, "up_proj": inner})
    yield from _fused("mlp.", mlp.down, {"down_proj": decoder.config.hidden_size})


def _fused(prefix: str, linear: Linear, rows: dict[str, int]) -> Iterator[tuple[str, WeightTarget]]:
    """One projection after the other along the output rows of one layer."""
    start = 0
    for name, count in rows.items():
        yield f"{prefix}{name}.weight", _whole(linear.weight[start : start + count], linear)
        if linear.bias is not None:
            yield f"{prefix}{name}.bias", _whole(linear.bias[start : start + count])
        start += count


def _whole(parameter: torch.Tensor, linear: Linear | None = None) -> WeightTarget:
    return WeightTarget(parameter, tuple(parameter.shape), linear)
