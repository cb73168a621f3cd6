"""The FP8 kernels against their reference at awkward shapes; see ``triton_cases``."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.kernels.fp8_linear import (
    FP8,
    Fp8Matrix,
    Gate,
    Rounding,
    prepare_fp8_weight,
    quantize_rows,
    round_rows,
)  # fmt: skip
from outrider.kernels.fp8_linear.kernel import Fp8Tiling, fp8_product
from outrider.kernels.fp8_linear.layout import Rounded
from outrider.kernels.fp8_linear.reference import WidenedWeight
from outrider.kernels.fp8_linear.rounding import normed_and_rounded, rounded
from outrider.kernels.fp8_linear.weight import Fp8Weight, num_splits
from outrider.kernels.gemv import NormedInput
from outrider.kernels.rms_norm.kernel import TritonNorm
from outrider.kernels.swiglu import geglu, swiglu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter's matrix product of bfloat16 is wrong.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = 4e-3 if INTERPRETED else 2e-2

ROUNDINGS = {
    "token": Rounding(1 << 20),
    "group": Rounding(128),
    "static": Rounding(None, torch.tensor(0.02, device=DEVICE)),
    "none": Rounding(None),
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(sum(shape)))


def matrix_of(num_rows: int, size: int, scale_rows: int | None) -> Fp8Matrix:
    """Matrix scaled by rows where ``scale_rows`` is None, else by blocks of as many rows."""
    if scale_rows is None:
        numbers, scales = quantize_rows(random(num_rows, size))
        return Fp8Matrix(numbers, scales, 1, size)
    blocks = (-(-num_rows // scale_rows), -(-size // 128))
    numbers = (random(num_rows, size) * 64).clamp(-448, 448).to(FP8)
    return Fp8Matrix(numbers, random(*blocks).abs() / 64 + 0.01, scale_rows, 128)


@pytest.mark.parametrize("name", ["token", "group", "static"])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 144), (2, 1200)])
def test_activations_are_rounded_to_the_references_numbers(rows: int, size: int, name: str) -> None:
    x = random(rows, size).to(DTYPE)
    x[0, :5] = 0
    rounding = ROUNDINGS[name]
    found = rounded(x, rounding)
    scales = torch.ones(()) if rounding.scale is None else rounding.scale
    if found.scales is not None:
        scales = found.scales[:, :rows].T.repeat_interleave(size if name == "token" else 128, 1)[:, :size]
    wide = found.numbers.float() * scales
    # On a CPU, where torch divides exactly: ties depend on it.
    on_cpu = Rounding(rounding.group, None if rounding.scale is None else rounding.scale.cpu())
    torch.testing.assert_close(wide.to(DTYPE).cpu(), round_rows(x.cpu(), on_cpu), atol=0, rtol=0)


def test_what_a_given_scale_is_too_small_for_is_the_largest_number() -> None:
    x = torch.tensor([[float("inf"), -float("inf"), 3e38, -3e38, 2.0]], device=DEVICE)
    found = rounded(x, Rounding(None, torch.tensor(1e-3, device=DEVICE)))
    assert found.numbers.float().tolist() == [[448.0, -448.0, 448.0, -448.0, 448.0]]


@pytest.mark.parametrize("num_partials", [None, 0, 2])
@pytest.mark.parametrize("name", ["token", "group", "static"])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 144), (2, 1200)])
def test_a_norm_rounds_to_the_numbers_of_norm_and_rounding(
    rows: int, size: int, name: str, num_partials: int | None
) -> None:
    """``num_partials`` None: nothing is added; 0: one addend of the stream's type."""
    x, weight = random(rows, size).to(DTYPE), random(size).to(DTYPE)
    delta = None
    if num_partials is not None:
        delta = (
            random(num_partials, rows, size) if num_partials else random(rows, size + 1)[:, 1:].contiguous().to(DTYPE)
        )
    stream, norm = x.clone(), TritonNorm(weight, 1e-5)
    normed = norm(stream) if delta is None else norm.after_adding(stream, delta)
    expected, found = (
        rounded(normed, ROUNDINGS[name]),
        normed_and_rounded(NormedInput(x, delta, weight, 1e-5), ROUNDINGS[name]),
    )
    assert torch.equal(x, stream)
    check_same(found, expected)


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("name", ["token", "group", "static"])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 144), (2, 1200)])
def test_a_gate_rounds_to_the_numbers_of_gate_and_rounding(rows: int, size: int, name: str, gate: Gate) -> None:
    gate_up = random(rows, 2 * size).to(DTYPE)
    found = rounded(gate_up, ROUNDINGS[name], gate)
    check_same(found, rounded((geglu if gate is Gate.GELU else swiglu)(gate_up), ROUNDINGS[name]))


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("scale_rows", [None, 128, 24])
@pytest.mark.parametrize(("rows", "out", "size"), [(1, 80, 144), (17, 200, 256)])
def test_products(rows: int, out: int, size: int, scale_rows: int | None, name: str) -> None:
    matrix, rounding = matrix_of(out, size, scale_rows), ROUNDINGS[name]
    x, bias = random(rows, size).to(DTYPE), random(out).to(DTYPE)
    weight = prepare_fp8_weight(matrix, rounding, DTYPE)
    assert isinstance(weight, Fp8Weight)
    expected = WidenedWeight(matrix, rounding, torch.float32)(x.float(), bias.float())
    check(weight(x, bias), expected)
    found = weight.partials(x, None)
    check(found.float().sum(0) if found.dim() == 3 else found, expected - bias.float())


@pytest.mark.parametrize("scale_rows", [None, 16])
def test_rows_with_scales_of_inputs_of_their_own(scale_rows: int | None) -> None:
    """Rows of tensors that are computed as one layer."""
    matrix, bias, x = matrix_of(80, 144, scale_rows), random(80).to(DTYPE), random(3, 144).to(DTYPE)
    scales = torch.tensor([0.02, 0.03, 0.02], device=DEVICE).repeat_interleave(
        torch.tensor([32, 16, 32], device=DEVICE)
    )
    found = prepare_fp8_weight(matrix, Rounding(None, scales), DTYPE)(x, bias)
    for row in (0, 31, 32, 47, 48, 79):
        whole = WidenedWeight(matrix, Rounding(None, scales[row]), torch.float32)(x.float(), bias.float())
        check(found[:, row], whole[:, row])


SHARED = [(None, 64, 2048), (128, 64, 2048)]
if not INTERPRETED:  # one part of K and several
    SHARED = [(None, 512, 4096), (128, 512, 4096), (None, 10_240, 5120), (None, 5120, 8192)]


@pytest.mark.parametrize(("scale_rows", "out", "size"), SHARED)
def test_a_row_is_the_same_with_any_others(scale_rows: int | None, out: int, size: int) -> None:
    """Bit for bit, in parts of K by programs of their own or by one."""
    assert num_splits(*SHARED[0][1:], 132) > 1
    matrix, rounding = matrix_of(out, size, scale_rows), Rounding(size if scale_rows is None else 128)
    dtype = torch.float32 if INTERPRETED else DTYPE  # whose rounding hides least
    weight = Fp8Weight(matrix, rounding, dtype, batch_invariant=True)
    counts = (1, 2, 17, 40) if INTERPRETED else (*range(1, 301), 512, 1000, 4096)
    x = random(counts[-1], size).to(DTYPE)
    whole = weight(x, None)
    for count in counts:
        first = (len(x) - count) // 2  # whatever its place
        assert torch.equal(weight(x[first : first + count].clone(), None), whole[first : first + count]), count
    tiling = Fp8Tiling(128, 128, 8, 3)
    together = fp8_product(rounded(x, rounding), matrix, None, splits=weight.splits, tiling=tiling, dtype=dtype)
    assert torch.equal(together, whole)
    assert not torch.equal(whole[1], whole[0])


def test_tiles_of_another_height_give_the_same_bits() -> None:
    """Tilings of few rows, for weights whose last tile is not whole."""
    size, out = (512, 200) if INTERPRETED else (5120, 10_200)
    matrix, x = matrix_of(out, size, None), rounded(random(5, size).to(DTYPE), Rounding(size))
    low, high = (
        fp8_product(x, matrix, None, splits=1, tiling=tiling, dtype=DTYPE)
        for tiling in (Fp8Tiling(16, 64, 4, 9), Fp8Tiling(16, 128, 4, 6))
    )
    assert torch.equal(low, high)
    assert low.any()


@pytest.mark.skipif(INTERPRETED, reason="the library has no such products on a CPU")
@pytest.mark.parametrize("name", ["token", "group", "static"])
@pytest.mark.parametrize(("out", "size"), [(384, 4096), (768, 512)])
def test_many_rows_are_the_librarys(out: int, size: int, name: str) -> None:
    matrix, rounding = matrix_of(out, size, 128 if name == "group" else None), ROUNDINGS[name]
    library, own = (Fp8Weight(matrix, rounding, DTYPE, batch_invariant=on) for on in (False, True))
    bias = random(out).to(DTYPE)
    for rows in (129, 257, 301, 1000, 2050):
        x = random(rows, size).to(DTYPE)
        check(library(x, bias), own(x, bias).float())
        check(library(x, None), own(x, None).float())
        found = library.partials(x, None)
        check(found.float().sum(0) if found.dim() == 3 else found, own(x, None).float())


def test_a_batch_without_rows() -> None:
    weight = prepare_fp8_weight(matrix_of(64, 128, None), Rounding(128), DTYPE)
    assert weight(random(0, 128).to(DTYPE), None).shape == (0, 64)


def check_same(found: Rounded, expected: Rounded) -> None:
    assert torch.equal(found.numbers.float(), expected.numbers.float())
    if expected.scales is None or found.scales is None:
        assert found.scales is expected.scales
    else:
        rows = len(found.numbers)
        assert torch.equal(found.scales[:, :rows], expected.scales[:, :rows])


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.isfinite().all()
    assert (found.float() - expected).norm() <= TOLERANCE / 2 * expected.norm()
