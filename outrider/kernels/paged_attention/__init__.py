"""Causal attention of ragged query rows over paged keys and values.

Contract: row b's queries are the last tokens of its context; query i sees the keys at positions up to its own, with a
sliding window w only the last w of those, and with s sinks the first s besides. The keys and values of the queries
themselves are stored before. No slot outside a row's context is ever read (free pages may hold anything, NaN included).
Heads are grouped: query head h reads KV head h // (H / H_kv).

A batch-invariant plan promises that an output has the same bits for any batch, number of queries, chunking and padding.

A plan is what depends on the batch and not on the layer: it is made once a forward for each window size. On a CPU
``plan_attention`` works it out row by row; on a GPU it is a ``DevicePlan`` over arrays that are already there.
"""

from __future__ import annotations

import torch

from outrider.kernels.paged_attention import reference
from outrider.kernels.paged_attention.device_plan import (
    MAX_DECODE_QUERIES,
    DevicePlan,
    PagedRows,
    RowSpan,
    can_take_chunks,
)
from outrider.kernels.paged_attention.reference import AttentionPlan, plan_attention

__all__ = [
    "AttentionPlan",
    "DevicePlan",
    "PagedRows",
    "RowSpan",
    "paged_attention",
    "plan_attention",
    "prepare_plan",
    "prepare_prompts",
]


def prepare_plan(
    plan: AttentionPlan | DevicePlan,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> AttentionPlan | DevicePlan:
    """The plan with what all layers of a forward share and a GPU works out itself: part of the forward, captured with
    it. Without it each layer does that work anew.
    """
    if not isinstance(plan, DevicePlan):
        return plan
    from outrider.kernels.paged_attention import kernel  # Triton is slow to import

    if plan.batch_invariant:
        from outrider.kernels.paged_attention import segment_schedule

        return segment_schedule.scheduled_segments(
            plan, num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
    max_queries, device = plan.rows.max_queries, plan.rows.context_lengths.device
    if max_queries > MAX_DECODE_QUERIES and can_take_chunks(dtype, head_dim, device):
        return plan
    return kernel.scheduled(
        plan, num_tokens=num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
    )


def prepare_prompts(
    num_heads: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Make ready for prompts of any length, so that none waits for a plan or a kernel; does nothing on a CPU."""
    if device.type == "cuda" and dtype.itemsize == 2:
        from outrider.kernels.paged_attention import prompts  # Triton is slow to import

        if prompts.takes_heads(head_dim, device):
            prompts.make_plans(num_heads, num_kv_heads, head_dim, dtype=dtype, device=device)


def paged_attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan | DevicePlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    value_scale: float | None = None,
) -> torch.Tensor:
    """Attend ``query`` [T, H, D] over one layer's ``kv`` [S, 2, H_kv, D]; returns [T, H, D]. Scores are multiplied by
    ``scale``, None: D ** -0.5; with a ``softcap`` c a score x then becomes c * tanh(x / c). ``sink_logits`` [H] float32
    are learned scores of a key without a value, one for each head, which take part in the softmax. ``kv`` may be FP8
    (E4M3) numbers, which are widened to the type of ``query``; what is returned is multiplied by ``value_scale``.
    """
    if isinstance(plan, DevicePlan):
        from outrider.kernels.paged_attention import chunks, invariant, kernel, prompts  # Triton is slow to import

        if plan.batch_invariant:
            return invariant.attend_segments(
                query, kv, plan, scale=scale, softcap=softcap, sink_logits=sink_logits, value_scale=value_scale
            )
        if chunks.takes_chunks(query, plan.rows.max_queries):
            is_plain = softcap is None and sink_logits is None and kv.dtype == query.dtype
            if is_plain and prompts.takes_prompts(query, plan):
                return prompts.attend_prompts(query, kv, plan, scale=scale)
            return chunks.attend_chunks(
                query, kv, plan, scale=scale, softcap=softcap, sink_logits=sink_logits, value_scale=value_scale
            )
        return kernel.paged_attention(
            query, kv, plan, scale=scale, softcap=softcap, sink_logits=sink_logits, value_scale=value_scale
        )
    return reference.paged_attention(
        query, kv, plan, scale=scale, softcap=softcap, sink_logits=sink_logits, value_scale=value_scale
    )
