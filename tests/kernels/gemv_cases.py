"""The kernels of ``gemv`` and ``embedding`` against their references, what they must write poisoned first.

Collected and run as ``triton_cases.py`` is.
"""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.embedding.kernel import look_up
from outrider.kernels.gemv import Matrix, NormedInput, reference
from outrider.kernels.gemv.kernel import GemvTiling, gated, product, qkv_with_rope
from outrider.kernels.rope_and_cache import CosSin, HeadLayout
from tests.kernels.triton_cases import DEVICE, DTYPES, INTERPRETED, NAN, _seed_and_poison, check, random

__all__ = ["_seed_and_poison"]

TILINGS = [GemvTiling(256, 1), GemvTiling(1 << 15, 8)]


def source(tokens: int, size: int, dtype: torch.dtype, *, adds: bool) -> NormedInput:
    delta = random(tokens, size, dtype=dtype) if adds else None
    return NormedInput(random(tokens, size, dtype=dtype), delta, random(size, dtype=dtype), 1e-5)


def wide(given: NormedInput) -> NormedInput:
    delta = None if given.delta is None else given.delta.double()
    return NormedInput(given.hidden.double(), delta, given.norm_weight.double(), given.eps)


def doubled(matrix: Matrix) -> Matrix:
    return Matrix(matrix.weight.double(), None if matrix.bias is None else matrix.bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "size", "outputs"), [(1, 64, 16), (2, 200, 21), (1, 1030, 3)])
def test_product(tokens: int, size: int, outputs: int, bias: bool, tiling: GemvTiling, dtype: torch.dtype) -> None:
    x, weight = random(tokens, size, dtype=dtype), random(outputs, size, dtype=dtype)
    offset = random(outputs, dtype=dtype) if bias else None
    matrix = Matrix(weight, offset)
    check(product(x, matrix, tiling=tiling), reference.product(x.double(), doubled(matrix)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("tokens", "size", "inner"), [(1, 64, 16), (2, 200, 13)])
def test_gated(tokens: int, size: int, inner: int, adds: bool, tiling: GemvTiling, dtype: torch.dtype) -> None:
    given, weight = source(tokens, size, dtype, adds=adds), random(2 * inner, size, dtype=dtype) / size**0.5
    matrix = Matrix(weight, random(2 * inner, dtype=dtype) if adds else None)
    before = given.hidden.clone()
    total, found = gated(given, matrix, tiling=tiling)
    assert torch.equal(given.hidden, before)
    expected = reference.gated(wide(given), doubled(matrix))
    check(total, expected[0], dtype)
    check(found, expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 12)] if INTERPRETED else [(4, 2, 8), (5, 1, 24)])
def test_turned(
    heads: int, kv_heads: int, head_dim: int, points: bool, adds: bool, tiling: GemvTiling, dtype: torch.dtype
) -> None:
    layout = HeadLayout(heads, kv_heads, head_dim, 1e-5)
    size, outputs = 72, (heads + 2 * kv_heads) * head_dim
    given, weight = source(2, size, dtype, adds=adds), random(outputs, size, dtype=dtype) / size**0.5
    matrix = Matrix(weight, random(outputs, dtype=dtype) if adds else None)
    slots = torch.tensor([6, -1], device=DEVICE, dtype=torch.int32)
    theta = torch.rand(9 if points else 2, 1, head_dim // 2, device=DEVICE) * 6
    cos, sin = theta.cos().repeat(1, 1, 2), torch.cat((-theta.sin(), theta.sin()), -1)
    rows = torch.tensor([8, 3], device=DEVICE, dtype=torch.int32) if points else None
    expected_kv = torch.full((12, 2, kv_heads, head_dim), NAN, device=DEVICE, dtype=torch.float64)
    # The reference knows no slot -1: the token goes to a slot that is poisoned again.
    cos_sin = CosSin(cos.double(), sin.double(), None if rows is None else rows.long())
    expected = reference.qkv_with_rope(
        wide(given), doubled(matrix), expected_kv, slots.long().where(slots >= 0, 5), cos_sin=cos_sin, heads=layout
    )
    expected_kv[5] = NAN
    kv = torch.full(expected_kv.shape, NAN, device=DEVICE, dtype=dtype)
    total, queries = qkv_with_rope(
        given, matrix, kv, slots, cos_sin=CosSin(cos, sin, rows), heads=layout, tiling=tiling
    )
    check(total, expected[0], dtype)
    check(queries, expected[1], dtype)
    written = ~expected_kv.isnan()
    assert torch.equal(~kv.isnan(), written)
    check(kv[written], expected_kv[written], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", [[0], [5, 5, 19, 0, 7]])
def test_look_up(ids: list[int], dtype: torch.dtype) -> None:
    table = random(20, 37, dtype=dtype)
    for kind in (torch.int32, torch.int64):
        found = look_up(torch.tensor(ids, device=DEVICE, dtype=kind), table)
        assert torch.equal(found, table[ids])
    assert look_up(torch.empty(0, dtype=torch.int32, device=DEVICE), table).shape == (0, 37)


@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")
@pytest.mark.parametrize("tokens", [1, 2])
def test_real_sizes(tokens: int) -> None:
    dtype = torch.bfloat16
    given = source(tokens, 2048, dtype, adds=True)
    weight = random(16384, 2048, dtype=dtype) / 2048**0.5
    total, inner = gated(given, Matrix(weight, None))
    expected = reference.gated(wide(given), doubled(Matrix(weight, None)))
    check(total, expected[0], dtype)
    check(inner, expected[1], dtype)
    down = random(2048, 8192, dtype=dtype) / 8192**0.5
    check(product(inner, Matrix(down, None)), inner.double() @ down.double().T, dtype)
