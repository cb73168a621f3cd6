"""Kernels over a cache of FP8 keys and values, against what the same kernels do with wider ones.

Collected and run as ``triton_cases.py`` is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels.fp8_linear import FP8
from outrider.kernels.gemv import Matrix, NormedInput
from outrider.kernels.gemv.kernel import qkv_with_rope
from outrider.kernels.kv_store import copy_pages
from outrider.kernels.paged_attention import DevicePlan, kernel, plan_attention, reference
from outrider.kernels.paged_attention.chunks import ChunkTiling, attend_chunks
from outrider.kernels.paged_attention.device_plan import AttentionTiling
from outrider.kernels.paged_attention.invariant import attend_segments
from outrider.kernels.paged_attention.segment_schedule import SegmentTiling
from outrider.kernels.rope_and_cache import CosSin, HeadLayout
from outrider.kernels.rope_and_cache.kernel import apply_rope_and_cache
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, pack, unpack
from tests.kernels.triton_cases import DEVICE, INTERPRETED, _seed_and_poison, check, ragged_batch, random

__all__ = ["_seed_and_poison"]

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
LAYOUTS = [HeadLayout(4, 2, 16, 1e-5), HeadLayout(4, 2, 16, 1e-5, key_scale=0.5, value_scale=0.003)]
SLOTS = [2, -1, 0]


def in_fp8(kv: torch.Tensor, layout: HeadLayout) -> torch.Tensor:
    """Bytes of the numbers of keys and values [S, 2, H_kv, D]."""
    inverse = 1.0 / torch.tensor([layout.key_scale, layout.value_scale], device=DEVICE)
    return (kv.float() * inverse[:, None, None]).clamp(-448, 448).to(FP8).view(torch.uint8)


def cos_sin() -> CosSin:
    theta = torch.rand(3, 1, 8, device=DEVICE)
    return CosSin(theta.cos().repeat(1, 1, 2).to(DTYPE), torch.cat((-theta.sin(), theta.sin()), -1).to(DTYPE))


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.zeros(4, 2, 2, 16, device=DEVICE, dtype=DTYPE)
    return wide, wide.to(FP8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_sum", [False, True])
def test_keys_and_values_are_rounded_from_what_a_wider_cache_holds(layout: HeadLayout, is_sum: bool) -> None:
    product = random(2, 3, 8 * 16) if is_sum else random(3, 8 * 16, dtype=DTYPE)
    slots, angles = torch.tensor(SLOTS, device=DEVICE, dtype=torch.int32), cos_sin()
    norm = random(6, 16, dtype=DTYPE)
    wide, narrow = caches()
    expected = apply_rope_and_cache(product.clone(), wide, slots, angles, layout, norm_weight=norm).clone()
    found = apply_rope_and_cache(product.clone(), narrow, slots, angles, layout, norm_weight=norm)
    assert found.dtype == DTYPE
    assert torch.equal(found, expected)
    assert wide.any()
    assert torch.equal(narrow.view(torch.uint8), in_fp8(wide, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_tokens_store_the_same_numbers(layout: HeadLayout) -> None:
    given = NormedInput(random(3, 72, dtype=DTYPE), None, random(72, dtype=DTYPE), 1e-5)
    matrix, slots = Matrix(random(8 * 16, 72, dtype=DTYPE), None), torch.tensor(SLOTS, device=DEVICE, dtype=torch.int32)
    wide, narrow = caches()
    angles = cos_sin()
    _, expected = qkv_with_rope(given, matrix, wide, slots, cos_sin=angles, heads=layout)
    _, found = qkv_with_rope(given, matrix, narrow, slots, cos_sin=angles, heads=layout)
    assert torch.equal(found, expected)
    assert torch.equal(narrow.view(torch.uint8), in_fp8(wide, layout))


def test_numbers_beyond_the_largest_are_the_largest() -> None:
    product = torch.full((1, 8 * 16), 2000.0, device=DEVICE, dtype=DTYPE)
    turned = CosSin(*(torch.full((1, 1, 16), value, device=DEVICE, dtype=DTYPE) for value in (1.0, 0.0)))
    narrow = caches()[1]
    slots = torch.tensor([1], device=DEVICE, dtype=torch.int32)
    apply_rope_and_cache(product, narrow, slots, turned, LAYOUTS[0])
    assert narrow[1].float().eq(448).all()


@pytest.mark.parametrize(
    ("contexts", "queries", "window", "value_scale"),
    [
        ([70, 9, 33], [5, 9, 1], None, 0.25),
        ([70, 9, 33], [5, 9, 1], 30, None),
        ([150], [1], None, 0.25),
        ([100, 40], [64, 1], 30, None),
    ],
)
def test_attention(contexts: list[int], queries: list[int], window: int | None, value_scale: float | None) -> None:
    batch, slots = ragged_batch(4, contexts, queries, num_pages=200)
    kv = torch.full((800, 2, 2, 16), float("nan"), device=DEVICE, dtype=torch.float32).to(FP8)
    kv.view(torch.uint8)[slots] = random(len(slots), 2, 2, 16).to(FP8).view(torch.uint8)
    query, sinks = random(sum(queries), 8, 16, dtype=DTYPE), random(8)
    plain = plan_attention(batch, page_size=4, window=window, device=torch.device("cpu"), dtype=torch.float64)
    for logits in (None, sinks):
        truth = reference.paged_attention(
            query.double().cpu(), kv.cpu(), plain, scale=0.4, value_scale=value_scale,
            sink_logits=None if logits is None else logits.cpu(),
        )  # fmt: skip
        options: dict[str, Any] = {"scale": 0.4, "sink_logits": logits, "value_scale": value_scale}
        for budget in (1, 9):
            plan = plan_of(batch, window)
            found = kernel.paged_attention(
                query, kv, plan, tiling=AttentionTiling(16, 16, 4, 2), budget=budget, **options
            )
            check(found, truth, DTYPE)
            found = attend_chunks(query, kv, plan, tiling=ChunkTiling(32, 16, 4, 3), budget=budget, **options)
            check(found, truth, DTYPE)
        tiling = SegmentTiling(16, 16 if INTERPRETED else 64, 4, 2)
        found = attend_segments(query, kv, plan_of(batch, window, batch_invariant=True), tiling=tiling, **options)
        check(found, truth, DTYPE)


def plan_of(batch: object, window: int | None, *, batch_invariant: bool = False) -> DevicePlan:
    shape, counters = BatchShape.of(batch), torch.zeros(512, dtype=torch.int32, device=DEVICE)  # type: ignore[arg-type]
    frame = BatchFrame(4, (window,), counters, batch_invariant=batch_invariant)
    numbers = torch.from_numpy(pack(batch, shape)).to(DEVICE)  # type: ignore[arg-type]
    plan = unpack(numbers, shape, frame, 0).groups[0].plan
    assert isinstance(plan, DevicePlan)
    return plan


def test_pages_are_copied_byte_by_byte() -> None:
    cache = torch.arange(2 * 6 * 2 * 16, device=DEVICE).remainder(256).to(torch.uint8).view(FP8).view(2, 6, 2, 1, 16)
    before = cache.clone().view(torch.uint8)
    copy_pages(cache, [(0, 1), (1, 2)], page_size=2)
    assert torch.equal(cache.view(torch.uint8)[:, 2:6], before[:, :4])
