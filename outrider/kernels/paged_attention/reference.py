"""The truth of ``paged_attention`` in PyTorch; runs on every device and is the CPU's kernel.

Rows are attended one by one over exactly their own context: nothing is padded, so a long prefill chunk beside many
short rows costs what it costs alone, and a row's result does not depend on the rest of the batch. A row whose pages
are neighbours is read in place; only scattered pages are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from outrider.kernels.kv_store import as_bytes

if TYPE_CHECKING:
    from outrider.model_executor.input_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Location of one row's queries, keys and mask."""

    query_start: int
    query_end: int
    first_slot: int
    """First slot of the keys, when ``slots`` is None."""
    num_keys: int
    slots: torch.Tensor | None  # [C] int64, when the pages are not neighbours
    mask: torch.Tensor | None  # [T, C] added to the scores; None when every query sees every key
    is_causal: bool
    """True for as many queries as keys, with the triangle as the whole mask."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One forward's rows under one window size."""

    rows: tuple[RowPlan, ...]


def plan_attention(
    batch: ForwardBatch,
    *,
    page_size: int,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    num_sinks: int = 0,
) -> AttentionPlan:
    """Work out, for all layers with this ``window`` (None: no window), what each row reads; the first ``num_sinks``
    tokens of a context are seen besides the window.
    """
    spans = [_KeySpan.of(batch, row, window) for row in range(batch.num_rows)]
    masks = _make_masks(spans, window, device, dtype)
    plans = [
        _plan_row(batch, row, span, masks, window=window, page_size=page_size, device=device)
        for row, span in enumerate(spans)
    ]
    if window is not None and num_sinks:
        for row, span in enumerate(spans):
            if span.end > window:
                plans[row] = _with_sinks(
                    batch, row, span, plans[row], window=window, num_sinks=num_sinks, page_size=page_size,
                    device=device, dtype=dtype,
                )  # fmt: skip
    return AttentionPlan(tuple(plans))


def _with_sinks(
    batch: ForwardBatch,
    row: int,
    span: _KeySpan,
    plan: RowPlan,
    *,
    window: int,
    num_sinks: int,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> RowPlan:
    """The plan of a row that sees the first tokens too, of which the window may have left some out."""
    keys = np.concatenate((np.arange(min(num_sinks, span.first)), np.arange(span.first, span.end)))
    queries = np.arange(span.end - span.num_queries, span.end)[:, None]
    visible = (keys <= queries) & ((keys > queries - window) | (keys < num_sinks))
    slots = np.array(batch.page_tables[row])[keys // page_size] * page_size + keys % page_size
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    return replace(
        plan,
        num_keys=len(keys),
        slots=torch.from_numpy(slots).to(device),
        mask=None if span.num_queries == 1 else mask.to(device),
        is_causal=False,
    )


def paged_attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    value_scale: float | None = None,
) -> torch.Tensor:
    """Attend ``query`` [T, H, D] over one layer's ``kv`` [S, 2, H_kv, D]; returns [T, H, D]. Scores are multiplied by
    ``scale``, None: D ** -0.5; with a ``softcap`` c a score x then becomes c * tanh(x / c). ``sink_logits`` [H] are
    scores of a key without a value, one for each head. FP8 numbers are widened; what is returned is multiplied by
    ``value_scale``.
    """
    in_place = _heads_first(kv)
    rows = []
    for row in plan.rows:
        selected = (
            in_place.narrow(3, row.first_slot, row.num_keys)
            if row.slots is None
            else _heads_first(as_bytes(kv).index_select(0, row.slots).view(kv.dtype))
        ).to(query.dtype)
        own = query[row.query_start : row.query_end]
        rows.append(
            _attend(own, selected, row, scale)
            if softcap is None and sink_logits is None
            else _attend_in_steps(
                own, selected, row, scale or query.shape[-1] ** -0.5, softcap=softcap, sink_logits=sink_logits
            )
        )
    found = rows[0] if len(rows) == 1 else torch.cat(rows)
    return found if value_scale is None else found * value_scale


def _heads_first(kv: torch.Tensor) -> torch.Tensor:
    return kv.permute(1, 2, 0, 3).unsqueeze(1)  # [2, 1, H_kv, S, D], a view


def _attend(query: torch.Tensor, selected: torch.Tensor, row: RowPlan, scale: float | None) -> torch.Tensor:
    keys, values = selected.unbind(0)  # [1, H_kv, C, D]
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    if num_tokens == 1:
        # The heads of a group are rows of queries to one KV head: no copy, and no grouping for the kernel to do.
        folded = query.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(folded, keys, values, scale=scale).reshape(1, num_heads, head_dim)
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),  # [1, H, T, D]
        keys,
        values,
        attn_mask=row.mask,
        is_causal=row.is_causal,
        scale=scale,
        enable_gqa=num_kv_heads != num_heads,
    )
    return attended.squeeze(0).transpose(0, 1)


def _attend_in_steps(
    query: torch.Tensor,
    selected: torch.Tensor,
    row: RowPlan,
    scale: float,
    *,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """``_attend`` step by step: PyTorch's own operation has no cap and no sinks."""
    group = query.shape[1] // selected.shape[2]
    keys, values = selected.squeeze(1).repeat_interleave(group, 1).unbind(0)  # [H, C, D]
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * scale  # [H, T, C]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if row.mask is not None:
        scores = scores + row.mask
    elif row.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
    if sink_logits is not None:
        sinks = sink_logits.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), -1)
    return (scores.softmax(-1)[..., : keys.shape[1]] @ values).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _KeySpan:
    """One row's keys: positions ``first`` to ``end``, of which the last ``num_queries`` are the queries' own."""

    first: int
    end: int
    num_queries: int

    @classmethod
    def of(cls, batch: ForwardBatch, row: int, window: int | None) -> _KeySpan:
        end = batch.context_lengths[row]
        num_queries = batch.query_starts[row + 1] - batch.query_starts[row]
        first = 0 if window is None else max(0, end - num_queries - window + 1)
        return cls(first, end, num_queries)

    @property
    def num_keys(self) -> int:
        return self.end - self.first

    def needs_mask(self, window: int | None) -> bool:
        """One query sees all of its span; as many queries as keys within the window are a plain triangle."""
        if self.num_queries == 1:
            return False
        return self.num_queries < self.num_keys or (window is not None and self.num_keys > window)


def _make_masks(
    spans: list[_KeySpan], window: int | None, device: torch.device, dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """One mask for each number of queries, as wide as its longest row needs: masks are alike seen from the last key."""
    widths: dict[int, int] = {}
    for span in spans:
        if span.needs_mask(window):
            widths[span.num_queries] = max(widths.get(span.num_queries, 0), span.num_keys)
    return {queries: _make_mask(queries, width, window, device, dtype) for queries, width in widths.items()}


def _make_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    queries = torch.arange(1 - num_queries, 1, device=device).unsqueeze(1)  # [T, 1] counted back from the last token
    keys = torch.arange(1 - num_keys, 1, device=device)  # [C]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _plan_row(
    batch: ForwardBatch,
    row: int,
    span: _KeySpan,
    masks: dict[int, torch.Tensor],
    *,
    window: int | None,
    page_size: int,
    device: torch.device,
) -> RowPlan:
    first_page, last_page = span.first // page_size, (span.end - 1) // page_size
    pages = np.array(batch.page_tables[row][first_page : last_page + 1])
    is_run = bool((pages[1:] - pages[:-1] == 1).all())
    offset = span.first - first_page * page_size
    needs_mask = span.needs_mask(window)
    return RowPlan(
        query_start=batch.query_starts[row],
        query_end=batch.query_starts[row + 1],
        first_slot=int(pages[0]) * page_size + offset,
        num_keys=span.num_keys,
        slots=None if is_run else _gather_slots(pages, offset, span.num_keys, page_size, device),
        mask=masks[span.num_queries][:, -span.num_keys :] if needs_mask else None,
        is_causal=span.num_queries > 1 and not needs_mask,
    )


def _gather_slots(
    pages: NDArray[np.int64], offset: int, num_keys: int, page_size: int, device: torch.device
) -> torch.Tensor:
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return torch.from_numpy(slots[offset : offset + num_keys]).to(device)
