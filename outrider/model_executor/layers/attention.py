"""Attention layer: fused query, key and value product, rotary embedding, paged attention, output product.

Queries, keys and values come from one product. A layer may read the keys and values of another one, and then has
queries alone; or have no values but its keys. Of several ranks each holds its heads; what the output product gives is
then a part of a sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.kernels.paged_attention import paged_attention
from outrider.kernels.rope_and_cache import CosSin, HeadLayout, apply_rope_and_cache
from outrider.kv_cache import KVCacheSpec
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import AttentionInputs, Residual, Weights, WeightTarget
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features, QueryTarget
from outrider.model_executor.layers.norm import RmsNorm, norm_dtype, norm_target
from outrider.model_executor.layers.rope import head_order
from outrider.model_executor.layers.wide_norm import WideNorm


class Attention:
    """One layer's attention over its keys and values in the cache."""

    weight_prefix = "self_attn."

    def __init__(
        self, context: LayerContext, layer: int, *, input_size: int | None = None, num_query_parts: int = 1
    ) -> None:
        """``input_size`` of queries, keys and values, where it is not the hidden size. ``num_query_parts``: runs of
        ``head_dim`` features of a head that come with its query, the query the first; others than 1 bring the product
        into order themselves.
        """
        config, part, shard = context.config, context.part, context.communicator.shard
        size = config.head_dim
        self.kv_cache_spec = KVCacheSpec(part.num_kv_heads, size, *config.reach(layer))
        has_keys = config.kv_source(layer) == layer
        num_kv_heads = part.num_kv_heads if has_keys else 0
        self._heads = HeadLayout(part.num_heads, num_kv_heads, size, config.rms_norm_eps)
        hidden = Features.all(input_size or config.hidden_size)
        self._order = order = head_order(config.rope_of(layer), size)
        loaded = order if num_query_parts == 1 else ()
        queries = Features(config.num_heads * size, _scaled(shard.heads(config), size))
        own = _scaled(shard.kv_heads(config), size)
        keys = Features(config.num_kv_heads * size, own, "k_proj", loaded)
        values = Features(config.num_kv_heads * size, own, "v_proj")
        module = f"model.layers.{layer}.self_attn."
        parts = Features(
            queries.size * num_query_parts, _scaled(shard.heads(config), size * num_query_parts), "q_proj", loaded
        )
        self._has_values = not config.layer_sizes or config.layer_sizes[layer].has_values
        outputs = (parts, *((keys,) if has_keys else ()), *((values,) if has_keys and self._has_values else ()))
        self.qkv = Linear(context, hidden, outputs, bias=config.qkv_bias, module=module)
        output = Features.all(config.hidden_size, "o_proj")
        self.output = Linear(context, queries, (output,), bias=config.output_bias, module=module)
        num_turned = part.num_heads + num_kv_heads
        # One weight a head, the queries' then the keys', so that both are normalised in one go.
        variant = config.variant
        self._scale = self._own_scale = variant.attention_scale
        self._softcap, self._offset = variant.attention_softcap, variant.norm_offset
        own_heads, self._num_heads = shard.heads(config), config.num_heads
        self._sink_part = slice(own_heads.start, own_heads.stop)
        self.sink_logits = (
            torch.empty(len(own_heads), dtype=torch.float32, device=context.device) if variant.has_sink_logits else None
        )
        self._value_scale: float | None = None
        self.wide_norm = WideNorm(context) if variant.has_wide_qk_norm else None
        self._value_norm: RmsNorm | None = None
        if variant.has_value_norm:
            self._value_norm = RmsNorm(size, config.rms_norm_eps, dtype=context.dtype, device=context.device)
            self._value_norm.weight.fill_(1.0)
        dtype = norm_dtype(context.dtype, self._offset)
        self.qk_norm = torch.empty(num_turned, size, dtype=dtype, device=context.device) if config.qk_norm else None

    def __call__(
        self, source: Residual, kv: torch.Tensor, cos_sin: CosSin, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend over the layer's ``kv`` [S, 2, H_kv, D]; stores the tokens' own keys and values first. Returns the
        residual stream with what was to be added, and what this block adds to it.
        """
        target = QueryTarget(kv, inputs.slots, cos_sin, self._heads, self.qk_norm)
        hidden, queries = self._queries(source, target)
        attended = self._attend(queries, kv, inputs)
        return hidden, self.output.to_residual(attended.reshape(queries.shape[0], -1))

    def _attend(self, queries: torch.Tensor, kv: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """``queries`` [T, H, D] over the layer's keys and values: [T, H, D]."""
        return paged_attention(
            queries, kv, inputs.plan, scale=self._scale, softcap=self._softcap, sink_logits=self.sink_logits,
            value_scale=self._value_scale,
        )  # fmt: skip

    @property
    def kv_scales(self) -> tuple[float, float]:
        """Factors of the numbers of an FP8 cache that give keys and values."""
        return self._heads.key_scale, self._heads.value_scale

    def set_kv_scales(self, key_scale: float, value_scale: float) -> None:
        """Set ``kv_scales``, before the first forward."""
        self._heads = replace(self._heads, key_scale=key_scale, value_scale=value_scale)
        self._scale = (self._own_scale or self._heads.head_dim**-0.5) * key_scale
        self._value_scale = None if value_scale == 1.0 else value_scale

    def store(self, source: Residual, kv: torch.Tensor, cos_sin: CosSin, inputs: AttentionInputs) -> None:
        """Store the keys and values of tokens that attend to nothing themselves."""
        self._queries(source, QueryTarget(kv, inputs.slots, cos_sin, self._heads, self.qk_norm))

    def _queries(self, source: Residual, target: QueryTarget) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, hidden], and its queries [T, H, D]; keys and values go to the ``target``."""
        if self.wide_norm is None and self._value_norm is None:
            return self.qkv.method.queries(source, target)
        hidden, x = source.normed()
        qkv = self.qkv(x)
        if self.wide_norm is not None:
            self.wide_norm(qkv)
        if self._value_norm is not None and self._heads.num_kv_heads:
            qkv = self._with_normed_values(qkv, self._value_norm)
        return hidden, apply_rope_and_cache(
            qkv, target.kv, target.slots, target.cos_sin, target.heads, norm_weight=target.norm_weight
        )

    def _with_normed_values(self, qkv: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """Queries, keys and values [T, (H + 2 H_kv) * D] of a product that may lack values."""
        width = self._heads.num_kv_heads * self._heads.head_dim
        if not self._has_values:
            qkv = torch.cat((qkv, qkv[:, -width:]), dim=1)
        values = qkv[:, -width:]
        values.copy_(norm(values.reshape(-1, self._heads.head_dim)).view(values.shape))
        return qkv

    def weights(self) -> Weights:
        """The projections' tensors, the norms of heads and their sinks."""
        yield from self.qkv.weights()
        yield from self.output.weights()
        if self.qk_norm is not None:
            num_heads = self._heads.num_heads
            for name, rows in (("q_norm", self.qk_norm[:num_heads]), ("k_norm", self.qk_norm[num_heads:])):
                if len(rows):
                    yield f"{name}.weight", norm_target(rows, self._offset, self._order)
        if self.wide_norm is not None:
            yield from self.wide_norm.weights()
        if self.sink_logits is not None:
            yield "sinks", WeightTarget(self.sink_logits, (self._num_heads,), (self._sink_part,))


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)
