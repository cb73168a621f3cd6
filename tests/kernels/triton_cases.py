"""Every Triton kernel against its contract at awkward shapes, what it must write poisoned first.

``conftest.py`` collects it where there is a GPU. On a CPU, ``test_triton.py`` runs it in Triton's interpreter,
in a process of its own: the interpreter is chosen before Triton is imported.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.kernels.fp8_linear import FP8
from outrider.kernels.kv_store import store_heads
from outrider.kernels.launching import launches_early, num_processors
from outrider.kernels.linear import few_rows, prepare_weight, split_k, stream_k
from outrider.kernels.linear.few_rows import (
    FewRowsWeight,
    can_tma,
    choose_tiling,
    fills_with_stream_k,
    num_splits,
    wastes_gate_tiles,
)
from outrider.kernels.linear.selection import gate_tiling, split_tiling, stream_k_tiling
from outrider.kernels.linear.skinny import SkinnyTiling, skinny_product
from outrider.kernels.paged_attention import (
    DevicePlan,
    kernel,
    paged_attention,
    plan_attention,
    prepare_plan,
    prompts,
    reference,
)
from outrider.kernels.paged_attention.chunks import ChunkTiling, attend_chunks, takes_chunks
from outrider.kernels.paged_attention.device_plan import AttentionTiling, num_counters, share_keys
from outrider.kernels.paged_attention.schedule import make_schedule
from outrider.kernels.rms_norm.kernel import TritonNorm
from outrider.kernels.room import empty_rows, with_room
from outrider.kernels.rope_and_cache import CosSin, HeadLayout
from outrider.kernels.rope_and_cache import kernel as rope_kernel
from outrider.kernels.rope_and_cache.kernel import apply_rope_and_cache
from outrider.kernels.rope_and_cache.reference import apply_rope_and_cache as reference_rope_and_cache
from outrider.kernels.sum_norm import SharedRows, flag_bytes
from outrider.kernels.sum_norm.kernel import sum_and_norm
from outrider.kernels.swiglu.kernel import swiglu
from outrider.kernels.swiglu.reference import clamped_swiglu
from outrider.kernels.swiglu.reference import geglu as reference_geglu
from outrider.kernels.swiglu.reference import swiglu as reference_swiglu
from outrider.kv_cache import KVCacheManager, PagePool
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, pack, spans_in, unpack
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, forward_shapes
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, plan_forward
from outrider.model_executor.input_buffer import PinnedInputBuffer
from tests.support.scattering import take_every_other_page

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter's matrix product of bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
NARROW = [dtype for dtype in DTYPES if dtype != torch.float32]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAN = float("nan")


@pytest.fixture(autouse=True)
def _seed_and_poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that a kernel asks for is NaN until it writes it."""
    torch.manual_seed(0)
    plain_empty = torch.empty

    def poisoned(*size: int, **options: object) -> torch.Tensor:
        tensor: torch.Tensor = plain_empty(*size, **options)  # type: ignore[call-overload]
        if tensor.is_floating_point():
            tensor.fill_(NAN)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    with torch.inference_mode():
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare by the size of the difference and, looser, element by element."""
    wide, truth = found.double().cpu(), expected.double().cpu()
    assert torch.isfinite(wide).all()
    assert (wide - truth).norm() <= TOLERANCES[dtype] / 2 * truth.norm()
    torch.testing.assert_close(wide, truth, atol=TOLERANCES[dtype] * 2, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 33), (5, 2048), (2, 3000)])
def test_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    weight, x, delta = random(size, dtype=dtype), random(rows, size, dtype=dtype), random(rows, size, dtype=dtype)
    norm = TritonNorm(weight, 1e-5)
    before = x.clone()
    check(norm(x), F.rms_norm(x.double(), (size,), weight.double(), 1e-5), dtype)
    assert torch.equal(x, before)
    found, total = norm.after_adding(x, delta), before.double() + delta.double()
    check(x, total, dtype)
    check(found, F.rms_norm(total, (size,), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_up_what_a_product_left(dtype: torch.dtype) -> None:
    x, partials, weight = random(5, 96, dtype=dtype), random(3, 5, 96), random(96, dtype=dtype)
    total, alike, norm = x.double() + partials.double().sum(0), x.clone(), TritonNorm(weight, 1e-5)
    found = norm.after_adding(x, partials)
    check(x, total, dtype)
    check(found, F.rms_norm(total, (96,), weight.double(), 1e-5), dtype)
    added_up = (partials[0] + partials[1] + partials[2]).to(dtype)
    assert torch.equal(norm.after_adding(alike, added_up), found), "both forms give the same bits"


def test_norm_of_a_batch_without_rows() -> None:
    assert TritonNorm(random(8), 1e-5)(random(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 1025), (7, 48)])
def test_swiglu(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * size, dtype=dtype) * 4
    check(swiglu(gate_up), reference_swiglu(gate_up.double()), dtype)
    check(swiglu(gate_up, is_gelu=True), reference_geglu(gate_up.double()), dtype)
    check(swiglu(gate_up, clamp=(1.7, 3.0)), clamped_swiglu(gate_up.double(), 1.7, 3.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (5, 1, 10), (3, 3, 64)])
def test_rope_and_cache(
    heads: int, kv_heads: int, head_dim: int, normed: bool, points: bool, dtype: torch.dtype
) -> None:
    layout = HeadLayout(heads, kv_heads, head_dim, 1e-5)
    slots = torch.tensor([6, -1, 0, 11], device=DEVICE, dtype=torch.int32)
    qkv = random(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weight = random(heads + kv_heads, head_dim, dtype=dtype) if normed else None
    theta = torch.rand(9 if points else 4, 1, head_dim // 2, device=DEVICE) * 6
    cos, sin = theta.cos().repeat(1, 1, 2), torch.cat((-theta.sin(), theta.sin()), -1)
    rows = torch.tensor([8, 3, 3, 0], device=DEVICE) if points else None
    expected_kv = torch.full((12, 2, kv_heads, head_dim), NAN, device=DEVICE, dtype=torch.float64)
    # The reference knows no slot -1: the token goes to a slot that is poisoned again.
    expected_queries = reference_rope_and_cache(
        qkv.double(), expected_kv, slots.long().where(slots >= 0, 5), CosSin(cos.double(), sin.double(), rows), layout,
        norm_weight=None if weight is None else weight.double(),
    )  # fmt: skip
    expected_kv[5] = NAN
    kv = torch.full(expected_kv.shape, NAN, device=DEVICE, dtype=dtype)
    queries = apply_rope_and_cache(qkv, kv, slots, CosSin(cos, sin, rows), layout, norm_weight=weight)
    assert queries.data_ptr() == qkv.data_ptr()
    check(queries, expected_queries, dtype)
    written = ~expected_kv.isnan()
    assert torch.equal(~kv.isnan(), written)
    check(kv[written], expected_kv[written], dtype)


@pytest.mark.parametrize("many", [1, 1000])
@pytest.mark.parametrize("dtype", NARROW)
def test_rope_and_cache_adds_up_what_a_product_left(
    dtype: torch.dtype, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope_kernel, "MANY_TOKENS", many)
    layout = HeadLayout(4, 2, 16, 1e-5)
    partials = random(2, 3, 8 * 16)
    slots, theta = torch.tensor([2, -1, 0], device=DEVICE, dtype=torch.int32), torch.rand(3, 1, 8, device=DEVICE)
    cos_sin = CosSin(theta.cos().repeat(1, 1, 2).to(dtype), torch.cat((-theta.sin(), theta.sin()), -1).to(dtype))
    expected_kv, kv = (torch.zeros(4, 2, 2, 16, device=DEVICE, dtype=dtype) for _ in range(2))
    expected = apply_rope_and_cache(partials.sum(0).to(dtype), expected_kv, slots, cos_sin, layout)
    queries = apply_rope_and_cache(partials, kv, slots, cos_sin, layout)
    assert queries.shape == (3, 4, 16)
    assert queries.dtype == dtype
    assert torch.equal(queries, expected)
    assert torch.equal(kv, expected_kv)
    assert kv.any()


def ragged_batch(
    page_size: int, contexts: list[int], queries: list[int], num_pages: int
) -> tuple[ForwardBatch, list[int]]:
    """Rows whose pages are scattered; and the slots that hold their contexts."""
    table = KVCacheManager(PagePool(num_pages, page_size))
    take_every_other_page(table)
    sequences = [table.open(context) for context in contexts]
    for sequence, context, count in zip(sequences, contexts, queries, strict=True):
        table.extend(sequence, [0] * (context - count))
    batch = plan_forward(table, [ForwardRow(s, [0] * count) for s, count in zip(sequences, queries, strict=True)])
    slots = [s.page_table[p // page_size] * page_size + p % page_size for s in sequences for p in range(s.length)]
    return batch, slots


def on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """Options of attention for the reference."""
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


CONTEXTS_AND_QUERIES = [
    ([1], [1]),
    ([37], [1]),
    ([70, 9, 33], [5, 9, 1]),
    ([100, 1, 64, 5], [64, 1, 2, 5]),
]


HEADS = [(4, 4, 8), (6, 2, 16), (5, 1, 24)]
GRID = list(itertools.product([None, 1, 9], CONTEXTS_AND_QUERIES, HEADS, [None, 1, 7, 200], DTYPES))
# The interpreter takes its time: every 23rd, so that each value of each parameter still meets many of the others'.
ATTENTION_CASES = GRID[::23] if INTERPRETED else GRID


@pytest.mark.parametrize(("budget", "contexts_and_queries", "head_counts", "window", "dtype"), ATTENTION_CASES)
def test_attention(
    budget: int | None,
    contexts_and_queries: tuple[list[int], list[int]],
    head_counts: tuple[int, int, int],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    page_size, (contexts, queries), (heads, kv_heads, head_dim) = 3, contexts_and_queries, head_counts
    batch, slots = ragged_batch(page_size, contexts, queries, num_pages=200)
    kv = torch.full((600, 2, kv_heads, head_dim), NAN, device=DEVICE, dtype=dtype)
    kv[slots] = random(len(slots), 2, kv_heads, head_dim, dtype=dtype)
    fused = random(sum(queries), heads + 2 * kv_heads, head_dim, dtype=dtype)
    query = fused.narrow(1, 0, heads)
    own_shape = BatchShape.of(batch)
    padded = BatchShape(own_shape.num_rows + 2, own_shape.num_tokens + 3, own_shape.max_queries + 1)
    options: dict[str, Any] = {"scale": 0.7, "softcap": 1.5} if window == 7 else {}
    if head_counts == (6, 2, 16):
        options["sink_logits"] = 2 * random(heads, dtype=torch.float32)
    plain = plan_attention(batch, page_size=page_size, window=window, device=torch.device("cpu"), dtype=torch.float64)
    truth = reference.paged_attention(query.double().cpu(), kv.double().cpu(), plain, **on_cpu(options))
    spread = BatchShape(padded.num_tokens, padded.num_tokens, padded.max_queries)  # far more rows than there are
    for shape in (own_shape, padded, spread):
        counters = torch.zeros(512, dtype=torch.int32, device=DEVICE)
        frame = BatchFrame(page_size, (window,), counters)
        plan = unpack(torch.from_numpy(pack(batch, shape)).to(DEVICE), shape, frame, 0).groups[0].plan
        assert isinstance(plan, DevicePlan)
        tiling = AttentionTiling(16, 16, 4, 2) if INTERPRETED else None
        rows = torch.cat((query, query.new_full((shape.num_tokens - len(query), heads, head_dim), NAN)))
        found = kernel.paged_attention(rows, kv, plan, tiling=tiling, budget=budget, **options)
        check(found[: len(query)], truth, dtype)
        assert found[len(query) :].isnan().all()
        if dtype == torch.float32:
            continue
        for shares in (1, 9):
            found = attend_chunks(rows, kv, plan, tiling=ChunkTiling(32, 16, 4, 3), budget=shares, **options)
            check(found[: len(query)], truth, dtype)
            assert found[len(query) :].isnan().all()
        assert not counters.any()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("contexts", "queries", "window"),
    [
        ([160], [160], None),
        ([290, 240], [70, 240], 290),
        ([560, 70, 264], [128, 64, 256], None),
        ([512], [480], None),
    ],
)
def test_prompts_are_attended_by_the_library(
    contexts: list[int], queries: list[int], window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_of_sizes = 4 if INTERPRETED else 1  # each query of each pair of blocks is a program
    monkeypatch.setattr(prompts, "BLOCK", 128 // scale_of_sizes)
    monkeypatch.setattr(prompts, "STEP", 32 // scale_of_sizes)
    monkeypatch.setattr(prompts, "MIN_QUERIES", 32 // scale_of_sizes)
    monkeypatch.setattr(prompts, "MAX_WASTE_RATIO", 5)
    contexts, queries = ([-(-size // scale_of_sizes) for size in sizes] for sizes in (contexts, queries))
    window = window and -(-window // scale_of_sizes)
    batch, slots = ragged_batch(4, contexts, queries, num_pages=500)
    kv = torch.full((2000, 2, 2, 64), NAN, device=DEVICE, dtype=dtype)
    kv[slots] = random(len(slots), 2, 2, 64, dtype=dtype)
    query = random(sum(queries), 4 + 2 * 2, 64, dtype=dtype).narrow(1, 0, 4)
    shape, frame = BatchShape.of(batch), BatchFrame(4, (window,), torch.zeros(512, dtype=torch.int32, device=DEVICE))
    numbers = pack(batch, shape)
    plan = unpack(torch.from_numpy(numbers).to(DEVICE), shape, frame, 0, spans=spans_in(numbers, shape)).groups[0].plan
    assert isinstance(plan, DevicePlan)
    assert prompts.takes_prompts(query, plan)
    plain = plan_attention(batch, page_size=4, window=window, device=torch.device("cpu"), dtype=torch.float64)
    for scale in (None, 0.05):
        truth = reference.paged_attention(query.double().cpu(), kv.double().cpu(), plain, scale=scale)
        check(paged_attention(query, kv, plan, scale=scale), truth, dtype)


@pytest.mark.parametrize(
    ("contexts", "queries", "window", "spans"),
    [
        ([32, 16], [32, 16], None, True),
        ([32, 16], [32, 7], None, True),
        ([32, 16], [32, 16], 20, True),
        ([31, 17], [10, 17], None, True),
        ([32, 16], [32, 16], None, False),
    ],
)
def test_the_library_attends_long_rows_with_little_padding_in_forwards_without_a_graph(
    contexts: list[int], queries: list[int], window: int | None, spans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "BLOCK", 16)
    monkeypatch.setattr(prompts, "STEP", 8)
    monkeypatch.setattr(prompts, "MIN_QUERIES", 8)
    batch, _ = ragged_batch(4, contexts, queries, num_pages=80)
    shape, frame = BatchShape.of(batch), BatchFrame(4, (window,), torch.zeros(512, dtype=torch.int32))
    numbers = pack(batch, shape)
    found = spans_in(numbers, shape) if spans else ()
    plan = unpack(torch.from_numpy(numbers), shape, frame, 0, spans=found).groups[0].plan
    assert isinstance(plan, DevicePlan)
    is_suited = spans and window is None and contexts == queries
    assert prompts.takes_prompts(random(sum(queries), 4, 16, dtype=torch.bfloat16), plan) == is_suited


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("queries", [1, 3])
def test_keys_of_long_contexts_are_shared_by_many_programs(queries: int, window: int | None) -> None:
    """Long contexts beside short ones; the plan prepared once, as for all layers; twice, to the same bits."""
    dtype, contexts = torch.float16, [300, 9, 400, 30, 5]
    batch, slots = ragged_batch(4, contexts, [queries] * 5, num_pages=400)
    kv = torch.full((1600, 2, 2, 16), NAN, device=DEVICE, dtype=dtype)
    kv[slots] = random(len(slots), 2, 2, 16, dtype=dtype)
    query, shape = random(5 * queries, 8, 16, dtype=dtype), BatchShape(7, 5 * queries, queries)
    counters = torch.zeros(num_counters(num_processors(DEVICE)), dtype=torch.int32, device=DEVICE)
    frame = BatchFrame(4, (window,), counters)
    plan = unpack(torch.from_numpy(pack(batch, shape)).to(DEVICE), shape, frame, 0).groups[0].plan
    assert isinstance(plan, DevicePlan)
    plain = plan_attention(batch, page_size=4, window=window, device=torch.device("cpu"), dtype=torch.float64)
    truth = reference.paged_attention(query.double().cpu(), kv.double().cpu(), plain)
    prepared = prepare_plan(plan, num_tokens=shape.num_tokens, num_heads=8, num_kv_heads=2, head_dim=16, dtype=dtype)
    assert isinstance(prepared, DevicePlan)
    assert prepared.schedule is not None
    cuts = prepared.schedule[6][prepared.schedule[0] > 0]
    assert int((cuts > 1).sum()) > int(cuts.max()) if window is None else int(cuts.max()) == 1, "two are cut"
    found, again = (paged_attention(query, kv, prepared) for _ in range(2))
    check(found, truth, dtype)
    assert torch.equal(found, again)
    assert torch.equal(found, paged_attention(query, kv, plan))
    assert not counters.any()


@pytest.mark.parametrize(
    ("contexts", "budget", "expected"),
    [
        ([64] * 4, 4, [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]),
        ([64] * 2, 4, [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]),
        ([16, 160, 16], 4, [(1, 0, 3), (1, 1, 3), (1, 2, 3), (0, 0, 1), (2, 0, 1)]),
        ([64, 80], 2, [(0, 0, 1), (1, 0, 1)]),
    ],
)
def test_a_schedule_cuts_what_is_longer_than_its_share(
    contexts: list[int], budget: int, expected: list[tuple[int, int, int]]
) -> None:
    """(row, part, parts of its tile) of each part; what is cut comes first."""
    batch, _ = ragged_batch(4, contexts, [1] * len(contexts), num_pages=200)
    shape = BatchShape(len(contexts) + 3, len(contexts) + 3, 1)
    frame = BatchFrame(4, (None,), torch.zeros(64, dtype=torch.int32, device=DEVICE))
    plan = unpack(torch.from_numpy(pack(batch, shape)).to(DEVICE), shape, frame, 0).groups[0].plan
    assert isinstance(plan, DevicePlan)
    sharing = share_keys(
        plan.rows, num_tokens=shape.num_tokens, num_heads=4, num_kv_heads=1, head_dim=16, dtype=torch.float16,
        num_processors=8, tiling=AttentionTiling(16, 16, 4, 2), budget=budget,
    )  # fmt: skip
    counts, first_queries, positions, pages, tiles, parts, cuts, cut_tiles = make_schedule(plan, sharing, 4).cpu()
    is_part = counts > 0
    assert is_part.tolist() == [number < len(expected) for number in range(sharing.num_parts)]
    rows = first_queries[is_part].tolist()
    assert list(zip(rows, parts[is_part].tolist(), cuts[is_part].tolist(), strict=True)) == expected
    assert positions[is_part].tolist() == [contexts[row] - 1 for row in rows]
    assert pages[is_part].tolist() == [int(plan.rows.page_starts[row]) for row in rows]
    assert not tiles[is_part].any()
    numbers = {row: int(cut_tiles[number]) for number, (row, _, cut) in enumerate(expected) if cut > 1}
    assert sorted(numbers.values()) == list(range(len(numbers)))


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize(
    ("contexts", "queries", "window"),
    [([202], [20], None), ([150, 40, 9], [3, 30, 9], 100), ([60, 150], [58, 10], 40)],
)
def test_chunks_over_longer_contexts(contexts: list[int], queries: list[int], window: int | None) -> None:
    """Tiles have blocks of keys that all queries see, that all but one see, that some see and that none do; twice, to
    the same bits.
    """
    dtype = torch.float16
    batch, slots = ragged_batch(4, contexts, queries, num_pages=300)
    kv = torch.full((1200, 2, 2, 16), NAN, device=DEVICE, dtype=dtype)
    kv[slots] = random(len(slots), 2, 2, 16, dtype=dtype)
    query, shape = random(sum(queries), 8, 16, dtype=dtype), BatchShape.of(batch)
    counters = torch.zeros(512, dtype=torch.int32, device=DEVICE)
    frame = BatchFrame(4, (window,), counters)
    plan = unpack(torch.from_numpy(pack(batch, shape)).to(DEVICE), shape, frame, 0).groups[0].plan
    assert isinstance(plan, DevicePlan)
    plain = plan_attention(batch, page_size=4, window=window, device=torch.device("cpu"), dtype=torch.float64)
    truth = reference.paged_attention(query.double().cpu(), kv.double().cpu(), plain)
    found, again = (attend_chunks(query, kv, plan, tiling=ChunkTiling(32, 16, 4, 3), budget=9) for _ in range(2))
    check(found, truth, dtype)
    assert torch.equal(found, again)
    assert not counters.any()


@pytest.mark.parametrize("num_sinks", [3, 40])
@pytest.mark.parametrize(
    ("contexts", "queries", "window"),
    [([200], [1], 30), ([150, 40, 9, 200], [3, 1, 5, 2], 50), ([44, 150], [44, 5], 40), ([200], [5], 17)],
)
def test_a_window_with_sinks(contexts: list[int], queries: list[int], window: int, num_sinks: int) -> None:
    """Both kernels, in few parts and in many."""
    dtype = torch.float16
    batch, slots = ragged_batch(4, contexts, queries, num_pages=300)
    kv = torch.full((1200, 2, 2, 16), NAN, device=DEVICE, dtype=dtype)
    kv[slots] = random(len(slots), 2, 2, 16, dtype=dtype)
    query, shape = random(sum(queries), 8, 16, dtype=dtype), BatchShape.of(batch)
    counters = torch.zeros(512, dtype=torch.int32, device=DEVICE)
    frame = BatchFrame(4, (window,), counters, (num_sinks,))
    plan = unpack(torch.from_numpy(pack(batch, shape)).to(DEVICE), shape, frame, 0).groups[0].plan
    assert isinstance(plan, DevicePlan)
    plain = plan_attention(
        batch, page_size=4, window=window, device=torch.device("cpu"), dtype=torch.float64, num_sinks=num_sinks
    )
    truth = reference.paged_attention(query.double().cpu(), kv.double().cpu(), plain)
    for budget in (1, 9):
        check(
            kernel.paged_attention(query, kv, plan, tiling=AttentionTiling(16, 16, 4, 2), budget=budget), truth, dtype
        )
        check(attend_chunks(query, kv, plan, tiling=ChunkTiling(32, 16, 4, 3), budget=budget), truth, dtype)
    assert not counters.any()


def test_chunks_are_for_many_queries_of_two_bytes() -> None:
    for dtype, max_queries, head_dim, takes in (
        (torch.float16, 18, 128, True), (torch.bfloat16, 512, 64, True), (torch.float16, 17, 128, False),
        (torch.float32, 512, 128, False), (torch.float16, 512, 256, False),
    ):  # fmt: skip
        assert takes_chunks(torch.zeros(1, 4, head_dim, dtype=dtype), max_queries) == takes


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("contexts", "queries"),
    [
        ([32_768], [5]),
        ([30_000, 7, 4096], [1, 3, 512]),
        ([9000, 30, 800], [200, 8, 1]),
        ([900] * 40, [8] * 40),
        ([50] * 31 + [30_000], [5] * 32),
        ([300] * 132, [1] * 132),
    ],
)
def test_attention_over_long_contexts(contexts: list[int], queries: list[int], dtype: torch.dtype) -> None:
    batch, slots = ragged_batch(16, contexts, queries, num_pages=12_000)
    kv = torch.full((192_000, 2, 2, 128), NAN, device=DEVICE, dtype=dtype)
    kv[slots] = random(len(slots), 2, 2, 128, dtype=dtype)
    query = random(sum(queries), 8, 128, dtype=dtype)
    shape = BatchShape.of(batch)
    counters = torch.zeros(512, dtype=torch.int32, device=DEVICE)
    plan = (
        unpack(torch.from_numpy(pack(batch, shape)).to(DEVICE), shape, BatchFrame(16, (None,), counters), 0)
        .groups[0]
        .plan
    )
    assert isinstance(plan, DevicePlan)
    truth = reference.paged_attention(
        query.float(), kv.float(), plan_attention(batch, page_size=16, window=None, device=DEVICE, dtype=torch.float32)
    )
    for _ in range(20):  # a race would show as a difference that moves
        check(paged_attention(query, kv, plan), truth, dtype)
    assert not counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("tokens", "size", "outputs"), [(1, 64, 16), (5, 200, 70), (16, 130, 33)])
def test_skinny_product(tokens: int, size: int, outputs: int, splits: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(tokens, size, dtype=dtype), random(outputs, size, dtype=dtype)
    offset = random(outputs, dtype=dtype) if bias else None
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    tiling = SkinnyTiling(16 if INTERPRETED else 64, 32, splits, 4, 3, 64)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    for _ in range(2):
        check(skinny_product(x, weight, offset, counters, tiling), expected, dtype)
        assert not counters.any()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tokens", [6, 16, 33, 70, 129, 160, 165, 200, 256])
def test_streamed_product(tokens: int, splits: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 328, dtype=dtype), random(80, 328, dtype=dtype)
    offset = random(80, dtype=dtype) if bias else None
    expected = x.double() @ weight.double().T
    tiling = replace(split_tiling(tokens, 2) or pytest.fail("nothing for 2 parts"), splits=splits)
    partials = split_k.split_k_partials(x, weight, tiling)
    assert partials.shape == (splits, tokens, 80)
    check(partials.sum(0), expected, dtype)
    found = split_k.sum_partials(partials, offset, dtype)
    check(found, expected + (0 if offset is None else offset.double()), dtype)
    for _ in range(1 if INTERPRETED else 20):  # a sum whose order changes would show as bits that change
        assert torch.equal(split_k.split_k_partials(x, weight, tiling), partials)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [6, 16, 17, 70, 128, 250])
def test_streamed_gate(tokens: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 200, dtype=dtype), random(2 * 70, 200, dtype=dtype) / 10
    offset = random(2 * 70, dtype=dtype) if bias else None
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    tiling = gate_tiling(tokens)
    assert tiling is not None
    check(split_k.gated_product(x, weight, offset, tiling), reference_swiglu(expected), dtype)


@pytest.mark.parametrize("tokens", [9, 40, 90, 150, 170])
def test_what_lies_behind_the_rows_changes_nothing(tokens: int) -> None:
    plain, weight = random(tokens, 328, dtype=torch.bfloat16), random(160, 328, dtype=torch.bfloat16)
    x = empty_rows(tokens, 328, dtype=torch.bfloat16, device=DEVICE)
    split, gate = split_tiling(tokens, 2) or pytest.fail("nothing for 2 parts"), gate_tiling(tokens)
    with_room(x, split_k.rows_of_tiles(tokens, split)).fill_(NAN)
    x.copy_(plain)
    partials = (split_k.split_k_partials(rows, weight, split) for rows in (x, plain))
    assert torch.equal(*partials)
    if gate is not None:
        gated = (split_k.gated_product(rows, weight, None, gate) for rows in (x, plain))
        assert torch.equal(*gated)


def test_the_library_computes_as_many_rows_as_it_is_fastest_with(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, computed = random(num_processors(DEVICE) // 4 * 3 * 64, 1024, dtype=torch.bfloat16) / 32, []
    x = empty_rows(300, 1024, dtype=torch.bfloat16, device=DEVICE)
    with_room(x, 384).fill_(NAN)
    x.copy_(random(300, 1024, dtype=torch.bfloat16))

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        computed.append(len(rows))
        return F.linear(rows, weight, bias)

    monkeypatch.setattr(few_rows, "F", SimpleNamespace(linear=linear))
    check(FewRowsWeight(weight)(x, None), x.double() @ weight.double().T, torch.bfloat16)
    assert computed == [384]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 16, 17, 100, 160, 161, 256, 257])
def test_what_a_weight_takes_over_and_leaves(rows: int, bias: bool, dtype: torch.dtype) -> None:
    tiles = num_processors(DEVICE) // 2
    x, weight = random(rows, 64, dtype=dtype), random(64 * tiles, 64, dtype=dtype) / 8
    offset = random(64 * tiles, dtype=dtype) if bias else None
    product = FewRowsWeight(weight)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    check(product(x, offset), expected, dtype)
    partials = product.partials(x, offset)
    is_left = not bias and 6 <= rows <= 256
    assert partials.dim() == (3 if is_left else 2)
    check(partials.sum(0) if is_left else partials, expected, dtype)
    check(product.gated(x, offset), reference_swiglu(expected), dtype)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("tokens", [6, 32, 33, 80, 128])
def test_three_tiles_are_shared_by_four_programs(tokens: int, dtype: torch.dtype) -> None:
    tiling = stream_k_tiling(tokens)
    assert tiling is not None
    x, weight = random(tokens, 1024, dtype=dtype), random(6 * tiling.block_n, 1024, dtype=dtype) / 32
    assert stream_k.can_stream_k(weight, tiling)
    assert not stream_k.can_stream_k(weight[tiling.block_n :], tiling)
    assert not stream_k.can_stream_k(weight[:, : 3 * tiling.block_k], tiling)
    partials = stream_k.stream_k_partials(x, weight, tiling)
    assert partials.shape == (2, tokens, 6 * tiling.block_n)
    check(partials.sum(0), x.double() @ weight.double().T, dtype)
    for _ in range(1 if INTERPRETED else 20):
        assert torch.equal(stream_k.stream_k_partials(x, weight, tiling), partials)


@pytest.mark.parametrize(
    ("outputs", "fills"), [(6144, True), (6208, False), (6272, False), (3072, False), (4096, False), (28672, False)]
)
def test_tiles_are_shared_where_that_fills_the_device(outputs: int, fills: bool) -> None:
    assert fills_with_stream_k(outputs, 132) == fills


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rows", [5, 6, 64, 128, 129])
def test_what_a_weight_leaves_in_quarters(rows: int, dtype: torch.dtype) -> None:
    outputs = num_processors(DEVICE) // 4 * 3 * 64
    x, weight = random(rows, 1024, dtype=dtype), random(outputs, 1024, dtype=dtype) / 32
    product = FewRowsWeight(weight)
    partials, expected = product.partials(x, None), x.double() @ weight.double().T
    assert partials.dim() == (3 if 6 <= rows <= 128 else 2)
    check(partials.sum(0) if partials.dim() == 3 else partials, expected, dtype)
    check(product(x, None), expected, dtype)
    offset = random(outputs, dtype=dtype)
    check(product.partials(x, offset), expected + offset.double(), dtype)


@pytest.mark.parametrize(("outputs", "splits"), [(2048, 4), (3072, None), (4096, 2), (6144, None), (28672, None)])
def test_sums_over_some_rows_are_split_where_that_fills_the_device(outputs: int, splits: int | None) -> None:
    assert num_splits(outputs, 132) == splits


@pytest.mark.parametrize(
    ("outputs", "is_wasteful"), [(14336, False), (17408, True), (8192, False), (28672, False), (3072, False)]
)
def test_a_last_round_of_gate_tiles_that_is_nearly_empty(outputs: int, is_wasteful: bool) -> None:
    assert wastes_gate_tiles(outputs, 132) == is_wasteful


def test_many_rows_of_a_gate_whose_last_round_is_nearly_empty_are_the_library_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, product_of = list[int](), split_k.gated_product

    def gated_product(x: torch.Tensor, *others: Any) -> torch.Tensor:
        computed.append(len(x))
        return product_of(x, *others)

    monkeypatch.setattr(split_k, "gated_product", gated_product)
    weight = random(128 * (num_processors(DEVICE) + 1), 64, dtype=torch.float16) / 8
    product = FewRowsWeight(weight)
    for rows in (64, 65, 128):
        x = random(rows, 64, dtype=torch.float16)
        check(product.gated(x, None), reference_swiglu(x.double() @ weight.double().T), torch.float16)
    assert computed == [64]


def test_rows_that_the_copy_engine_refuses_are_left_to_others() -> None:
    assert can_tma(random(64, 64, dtype=torch.float16))
    assert not can_tma(random(64, 60, dtype=torch.float16))
    assert not can_tma(random(65 * 64, dtype=torch.float16)[4:-60].view(64, 64))


def test_every_number_of_rows_is_taken_as_one_that_is_captured() -> None:
    """No kernel is compiled for a batch."""
    captured = {shape.num_tokens for shape in forward_shapes(DEFAULT_LIMITS, has_chunks=True)}
    for tiling in (gate_tiling, stream_k_tiling, partial(split_tiling, splits=2)):
        assert {tiling(rows) for rows in range(200)} <= {tiling(rows) for rows in captured} | {None}


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [2048, 4096, 6144])
def test_prepared_weights_whatever_the_number_of_rows(outputs: int, dtype: torch.dtype) -> None:
    weight, bias = random(outputs, 512, dtype=dtype), random(outputs, dtype=dtype)
    product = prepare_weight(weight)
    assert isinstance(product, FewRowsWeight) == (dtype != torch.float32 and launches_early(weight.device))
    for rows in (0, 1, 5, 16, 17, 160, 300):
        x = random(rows, 512, dtype=dtype)
        expected = x.double() @ weight.double().T + bias.double()
        assert torch.isfinite(product(x, bias)).all()
        error = (product(x, bias).double() - expected).norm()
        # Plain float32 products may take the matrix unit's shorter form.
        assert error <= max(TOLERANCES[dtype], 1e-3) * expected.norm()


@pytest.mark.parametrize(("outputs", "splits"), [(2048, 4), (3072, 1), (4096, 2), (6144, 1), (28672, 1), (33, 1)])
def test_sums_are_split_where_that_fills_the_device_once(outputs: int, splits: int) -> None:
    assert choose_tiling(outputs, 132).splits == splits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 256])
def test_sums_of_ranks_are_added_and_normalised(size: int, dtype: torch.dtype) -> None:
    """One rank of three, the others having shown their rows of every round before it begins."""
    ranks, max_rows, num_rows, rank = 3, 4, 3, 1
    flags = flag_bytes(max_rows, ranks)
    buffers = [torch.zeros(flags + 2 * max_rows * size * 4, dtype=torch.uint8, device=DEVICE) for _ in range(ranks)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=DEVICE)
    rounds = torch.zeros(max_rows, dtype=torch.int32, device=DEVICE)
    shared = SharedRows(addresses, rounds, rank, ranks, max_rows, size * 4)

    def flags_of(owner: int) -> torch.Tensor:
        return buffers[owner][: 4 * max_rows * ranks].view(torch.int32).view(max_rows, ranks)

    for this_round in (1, 2, 3):
        parts = torch.randn(ranks, num_rows, size, device=DEVICE).to(dtype)
        half = (this_round & 1) * max_rows * size
        for peer in (0, 2):
            shown = buffers[peer][flags:].view(dtype)
            shown[half : half + num_rows * size] = parts[peer].flatten()
            flags_of(rank)[:num_rows, peer] = this_round
        x, weight = torch.randn(num_rows, size, device=DEVICE).to(dtype), torch.randn(size, device=DEVICE).to(dtype)
        added = (x.float() + parts.float().sum(0)).to(dtype)
        out = sum_and_norm(x, parts[rank], weight, 1e-5, shared)
        torch.testing.assert_close(x, added, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        expected = F.rms_norm(added.float(), (size,), weight.float(), 1e-5)
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        for peer in (0, 2):  # and this rank's row was shown to both
            assert flags_of(peer)[:num_rows, rank].tolist() == [this_round] * num_rows
        own = buffers[rank][flags:].view(dtype)[half : half + num_rows * size].view(num_rows, size)
        torch.testing.assert_close(own, parts[rank], atol=0, rtol=0)
    assert rounds.tolist() == [3, 3, 3, 0]


@pytest.mark.parametrize("count", [0, 1, 4, 2047, 2048, 2049, 5000])
def test_a_launch_takes_in_what_was_put(count: int) -> None:
    input_buffer = PinnedInputBuffer(5000, DEVICE)
    input_buffer.numbers.fill_(-7)
    numbers = np.arange(3, 3 + count, dtype=np.int32)
    input_buffer.put(numbers)
    numbers_put = numbers.copy()
    numbers[:] = -1  # the caller's again
    input_buffer.copy_inputs()
    input_buffer.copy_inputs()  # nothing is left to copy
    found = input_buffer.numbers.cpu().numpy()
    np.testing.assert_array_equal(found[:count], numbers_put)
    assert (found[count:] == -7).all()


def test_what_was_put_stays_until_a_launch_has_read_it() -> None:
    """Many rounds with the device kept busy, each of other numbers than the one before."""
    input_buffer = PinnedInputBuffer(4096, DEVICE)
    rounds = 3 if INTERPRETED else 200
    found = []
    work = random(*((8, 8) if INTERPRETED else (4096, 4096)))
    for number in range(rounds):
        work = (work @ work).tanh()
        input_buffer.put(np.full(4096 - number, number, dtype=np.int32))
        input_buffer.copy_inputs()
        found.append(input_buffer.numbers[: 4096 - number].clone())
    for number, taken in enumerate(found):
        assert (taken == number).all()


@pytest.mark.parametrize(("num_heads", "size"), [(1, 8), (3, 10), (5, 64)])
@pytest.mark.parametrize("values_lie", ["beside", "transposed", "within heads"])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_heads_of_any_strides_are_stored_in_their_slots(
    num_heads: int, size: int, values_lie: str, *, is_fp8: bool
) -> None:
    """Keys and values are parts of one product, or values a part of each head's; slot -1 is no token's."""
    slots = torch.tensor([3, -1, 0, 19, 7, -1, 5], dtype=torch.int32, device=DEVICE)
    product = torch.randn(len(slots), 3 * num_heads * size, device=DEVICE)
    keys, values = (part.view(len(slots), num_heads, size) for part in product.chunk(3, -1)[1:])
    if values_lie == "transposed":
        values = values.transpose(1, 2).contiguous().transpose(1, 2)
    elif values_lie == "within heads":
        values = torch.cat((keys, values), -1)[..., size:]
    kv = torch.full((20, 2, num_heads, size), float("nan"), device=DEVICE)
    expected, is_token = kv.clone(), slots >= 0
    expected[slots[is_token].long()] = torch.stack((keys, values), dim=1)[is_token]
    if is_fp8:
        kv = kv.to(FP8)
        expected[:, 0] *= 256.0
        expected = torch.where(expected.isnan(), expected, expected.clamp(-448, 448)).to(FP8)
    store_heads(kv, slots, keys, values, scales=(1 / 256, 1.0))
    torch.testing.assert_close(kv.float(), expected.float(), atol=0, rtol=0, equal_nan=True)
