"""Draft loops on a CPU, which services have on GPUs alone: the kernels of a step in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels.kv_store import store_kv
from outrider.kernels.paged_attention import DevicePlan, kernel, reference
from outrider.kernels.paged_attention.reference import AttentionPlan, RowPlan
from outrider.kernels.rope_and_cache import reference as rope_and_cache
from outrider.model_executor import worker


def have_loops(patched: pytest.MonkeyPatch) -> None:
    """Draft models that are loaded from now on draw in loops."""
    patched.setattr(worker, "runs_loops", lambda _: True)
    patched.setattr(kernel, "scheduled", lambda plan, **_: plan)
    patched.setattr(kernel, "paged_attention", _attend)
    patched.setattr(rope_and_cache, "store_kv", _store)


def _store(kv: torch.Tensor, slots: torch.Tensor, key_value: torch.Tensor) -> None:
    is_kept = slots >= 0
    store_kv(kv, slots[is_kept].long(), key_value[is_kept])


def _attend(query: torch.Tensor, kv: torch.Tensor, plan: DevicePlan, **options: Any) -> torch.Tensor:
    found = torch.zeros_like(query)
    rows = _rows_of(plan)
    attended = reference.paged_attention(query, kv, AttentionPlan(tuple(rows)), **options)
    found[[place for row in rows for place in range(row.query_start, row.query_end)]] = attended
    return found


def _rows_of(plan: DevicePlan) -> list[RowPlan]:
    rows, size = plan.rows, plan.page_size
    starts, page_starts = rows.query_starts.tolist(), rows.page_starts.tolist()
    found = []
    for row, context in enumerate(rows.context_lengths.tolist()):
        num_queries = starts[row + 1] - starts[row]
        if num_queries:
            positions = torch.arange(context)
            slots = rows.pages[page_starts[row] : page_starts[row + 1]][positions // size].long() * size
            hidden = positions > torch.arange(context - num_queries, context)[:, None]
            mask = None if num_queries == 1 else torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
            found.append(RowPlan(starts[row], starts[row + 1], 0, context, slots + positions % size, mask, False))
    return found
