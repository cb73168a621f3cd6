"""Gated attention: attention whose heads are multiplied by the sigmoid of a gate before the output product.

The checkpoint has each head's gate behind its query. The product's columns are brought into the order of queries, keys,
values and gates when they are computed, not when they are loaded: blocks of a quantized weight have one scale.
"""

from __future__ import annotations

import torch

from outrider.kernels.rope_and_cache import CosSin, apply_rope_and_cache
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import AttentionInputs, Residual


class GatedAttention(Attention):
    """One layer's attention; a ``TokenMixer``."""

    def __init__(self, context: LayerContext, layer: int) -> None:
        super().__init__(context, layer, num_query_parts=2)
        size, heads = self._heads.head_dim, self._heads
        order = torch.tensor(self._order or range(size))
        queries = torch.arange(heads.num_heads)[:, None] * 2 * size
        keys = torch.arange(heads.num_kv_heads)[:, None] * size + 2 * heads.num_heads * size
        values, gates = keys + heads.num_kv_heads * size + torch.arange(size), queries + size + torch.arange(size)
        columns = torch.cat([part.flatten() for part in (queries + order, keys + order, values, gates)])
        device = torch.device("cpu") if context.device.type == "meta" else context.device
        self._arrays = columns.to(device)
        self._num_queries = heads.num_heads * size

    def __call__(
        self, source: Residual, kv: torch.Tensor, cos_sin: CosSin, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Attention``."""
        hidden, x = source.normed()
        product = self.qkv(x).index_select(1, self._arrays)
        num_gates = self._num_queries
        qkv, gates = product[:, :-num_gates].contiguous(), product[:, -num_gates:]
        queries = apply_rope_and_cache(qkv, kv, inputs.slots, cos_sin, self._heads, norm_weight=self.qk_norm)
        gated = self._attend(queries, kv, inputs).reshape(len(x), -1) * gates.sigmoid()
        return hidden, self.output.to_residual(gated)
