"""Cases of attention: rows that are scored, one of them with a long context, a prompt's chunk over a long context, and
that chunk beside such rows.

Sizes are an 8B model's on a GPU and tiny on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from outrider.benchmarks.kernels.cases import KernelCase, KernelPlace, relative_error
from outrider.benchmarks.kernels.layers import PAGE_SIZE, TOLERANCES, BenchmarkLayer, layer_sizes
from outrider.kernels.launching import num_processors
from outrider.kernels.paged_attention import AttentionPlan, DevicePlan, paged_attention, plan_attention, prepare_plan
from outrider.kernels.paged_attention.device_plan import num_counters
from outrider.kv_cache import KVCacheManager, PagePool
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, pack, unpack
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, plan_forward

Span = tuple[int, int]
"""A row's context and how many queries end it."""
_ROWS_BESIDE = 8
"""Rows of decoding beside a prompt."""


def attention_cases(place: KernelPlace, *, num_rows: int, tokens_per_row: int) -> Iterator[KernelCase]:
    """All of them; up to 8 of the rows run beside the chunk."""
    sizes = layer_sizes(place)
    chunk, past = (256, 8192) if place.is_large else (16, 64)
    row = (sizes.context, tokens_per_row)
    size, chunk_size = f"{num_rows} x {tokens_per_row} over {sizes.context}", f"{chunk} over {past}"
    beside = min(num_rows, _ROWS_BESIDE)
    yield _attention(place, "paged attention", size, [row] * num_rows, sizes)
    long = (120_000 if place.is_large else 640, tokens_per_row)
    spread = f"{num_rows - 1} x {tokens_per_row} over {sizes.context}, 1 over {long[0]}"
    yield _attention(place, "paged attention, one long", spread, [row] * (num_rows - 1) + [long], sizes)
    yield _attention(place, "paged attention, chunk", chunk_size, [(past, chunk)], sizes)
    mixed = f"{chunk_size}, {beside} x {tokens_per_row} over {sizes.context}"
    yield _attention(place, "paged attention, chunk beside", mixed, [row] * beside + [(past, chunk)], sizes)


def _attention(place: KernelPlace, name: str, size: str, spans: list[Span], sizes: BenchmarkLayer) -> KernelCase:
    pages = sum(-(-context // PAGE_SIZE) for context, _ in spans)
    batch = _batch(spans, pages)
    plan = _device_plan(batch, place) if place.is_large else _reference_plan(batch, place, place.dtype)
    query = place.random(sum(queries for _, queries in spans), sizes.num_heads, sizes.head_dim)
    plan = prepare_plan(
        plan, num_tokens=len(query), num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim, dtype=place.dtype,
    )  # fmt: skip
    num_sets = 2 if place.is_large else 1
    caches = [place.random(pages * PAGE_SIZE, 2, sizes.num_kv_heads, sizes.head_dim) for _ in range(num_sets)]

    def difference() -> float:
        from outrider.kernels.paged_attention import reference

        wide = _reference_plan(batch, place, torch.float32)
        truth = reference.paged_attention(query.float(), caches[0].float(), wide)
        return relative_error(paged_attention(query, caches[0], plan), truth)

    return KernelCase(
        name, size, caches[0].nbytes + 2 * query.nbytes,
        lambda i: paged_attention(query, caches[i % num_sets], plan), difference, TOLERANCES[place.dtype],
    )  # fmt: skip


def _batch(spans: list[Span], pages: int) -> ForwardBatch:
    table = KVCacheManager(PagePool(pages, PAGE_SIZE))
    sequences = [table.open(context) for context, _ in spans]
    for sequence, (context, queries) in zip(sequences, spans, strict=True):
        table.extend(sequence, [0] * (context - queries))
    rows = zip(sequences, spans, strict=True)
    return plan_forward(table, [ForwardRow(sequence, [0] * queries) for sequence, (_, queries) in rows])


def _reference_plan(batch: ForwardBatch, place: KernelPlace, dtype: torch.dtype) -> AttentionPlan:
    return plan_attention(batch, page_size=PAGE_SIZE, window=None, device=place.device, dtype=dtype)


def _device_plan(batch: ForwardBatch, place: KernelPlace) -> AttentionPlan | DevicePlan:
    counters = torch.zeros(num_counters(num_processors(place.device)), dtype=torch.int32, device=place.device)
    shape = BatchShape.of(batch)
    buffer = torch.from_numpy(pack(batch, shape)).to(place.device)
    return unpack(buffer, shape, BatchFrame(PAGE_SIZE, (None,), counters), 0).groups[0].plan
