"""Causal attention of ragged query rows over paged keys and values.

Contract: row b's queries are the last tokens of its context; query i sees the keys at positions up to its own, and
with a sliding window w only the last w of those. The keys and values of the queries themselves are stored before. No
slot outside a row's context is ever read (free pages may hold anything, NaN included). Heads are grouped: query head h
reads KV head h // (H / H_kv).

A plan is what depends on the batch and not on the layer: it is made once a forward for each window size.
"""

from __future__ import annotations

from outrider.engine.kernels.paged_attention.reference import AttentionPlan, paged_attention, plan_attention

__all__ = ["AttentionPlan", "paged_attention", "plan_attention"]
