# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Split-K product of six to a few hundred rows on a GPU: enough to keep the matrix unit nearly as busy as memory.

A program computes one tile of the weight's rows for one group of x's rows. Up to some 160 rows there is one group, so
the weight is read once; programs of one tile run side by side and find it in the second-level cache. The rows of x are
the columns of the matrix unit's tile, in two parts where one part would be far too wide or too narrow. TMA fills shared
memory ahead of the product. K is split so that every multiprocessor has one program. The partial sums of a tile are
summed in a fixed order, by the kernel that reads them or by ``sum_partials``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.kernels.fetching import fetch_ahead
from outrider.kernels.launching import launch_options
from outrider.kernels.linear.selection import Tiling
from outrider.kernels.room import empty_rows, with_room

_NO_WIDTH = 16
"""Columns of a part that is not there."""
_SUMMED = 2048
"""Elements of a sum that one program adds up."""
PART_COLUMNS = 128
"""Parts of K are multiples of it, whatever the tiles: the order of a weight's sums is that of its number of parts."""
_PART_COLUMNS = tl.constexpr(PART_COLUMNS)


@triton.jit
def fetch_rows(weight_ptr, first_row, end, first, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Prefetch columns from ``first`` on of a tile of rows that ends at ``end``."""
    row = tl.minimum(first_row + tl.arange(0, ROWS), end - 1)
    column = tl.minimum(first + tl.arange(0, COLUMNS // 64) * 64, K - 1)
    fetch_ahead(weight_ptr + row.to(tl.int64)[:, None] * K + column[None, :])


@triton.jit
def add_to_product(total, addend):
    """Sum of a product and something else, each rounded before. Of a plain sum after a loop of one step the compiler
    makes the accumulator that the step begins with, and columns are added to it one by one.
    """
    return tl.fma(total, 1.0, addend)


@triton.jit
def store_transposed(tile, out_ptr, first_token, num_tokens, n, size, WIDTH: tl.constexpr):
    """Store a tile [N, T], transposed, to ``out`` [T, N]."""
    t = first_token + tl.arange(0, WIDTH)
    inside = (t < num_tokens)[:, None] & (n < size)[None, :]
    tl.store(out_ptr + t[:, None] * size + n[None, :], tl.trans(tile).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def columns(
    x_desc,
    rest_desc,
    weight_desc,
    first_token,
    row,
    low,
    high,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Product of a tile of rows and a group of tokens over the columns ``low`` to ``high``, in its two parts."""
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    rest = tl.zeros([BLOCK_N, REST], tl.float32)
    for column in range(low, high, BLOCK_K):
        weight = weight_desc.load([row, column])
        total = tl.dot(weight, x_desc.load([first_token, column]).T, total)
        if HAS_REST:
            rest = tl.dot(weight, rest_desc.load([first_token + WIDTH, column]).T, rest)
    return total, rest


@triton.jit(do_not_specialize=["num_tokens"])
def _split_k_kernel(
    x_desc,  # [T, K], by [WIDTH, BLOCK_K]
    rest_desc,  # [T, K], by [REST, BLOCK_K]
    weight_desc,  # [N, K], by [BLOCK_N, BLOCK_K]
    weight_ptr,  # [N, K]
    partials_ptr,  # [SPLITS, T, N] float32
    num_tokens,
    out_features,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    FETCHED: tl.constexpr,  # columns of the weight fetched ahead
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    first_token = tl.program_id(0) * (WIDTH + (REST if HAS_REST else 0))
    row = tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    PART: tl.constexpr = (K + SPLITS * _PART_COLUMNS - 1) // (SPLITS * _PART_COLUMNS) * _PART_COLUMNS
    low = split * PART
    high = tl.minimum(low + PART, K)
    if PDL:
        gdc_launch_dependents()
        if FETCHED > 0:
            fetch_rows(weight_ptr, row, out_features, low, K, BLOCK_N, FETCHED)
        gdc_wait()
    total, rest = columns(
        x_desc, rest_desc, weight_desc, first_token, row, low, high, WIDTH, REST, HAS_REST, BLOCK_N, BLOCK_K
    )
    n = row + tl.arange(0, BLOCK_N)
    out_ptr = partials_ptr + split.to(tl.int64) * num_tokens * out_features
    store_transposed(total, out_ptr, first_token, num_tokens, n, out_features, WIDTH)
    if HAS_REST:
        store_transposed(rest, out_ptr, first_token + WIDTH, num_tokens, n, out_features, REST)


@triton.jit
def _sum_partials_kernel(
    partials_ptr,  # [SPLITS, T, N] float32
    bias_ptr,  # [N]
    y_ptr,  # [T, N]
    size,  # T * N
    out_features,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials_ptr + split * size + place, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + place % out_features, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_gated(gate, up, out_ptr, first_token, num_tokens, n, size, WIDTH: tl.constexpr):
    store_transposed(gate / (1.0 + tl.exp(-gate)) * up, out_ptr, first_token, num_tokens, n, size, WIDTH)


@triton.jit(do_not_specialize=["num_tokens"])
def _split_k_gate_kernel(
    x_desc,  # [T, K], by [WIDTH, BLOCK_K]
    rest_desc,  # [T, K], by [REST, BLOCK_K]
    weight_desc,  # [2 N, K], by [BLOCK_N, BLOCK_K]
    weight_ptr,  # [2 N, K]
    bias_ptr,  # [2 N]
    out_ptr,  # [T, N]
    num_tokens,
    size,  # N
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FETCHED: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    first_token = tl.program_id(0) * (WIDTH + (REST if HAS_REST else 0))
    row = tl.program_id(1) * BLOCK_N
    n = row + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        if FETCHED > 0:
            fetch_rows(weight_ptr, row, size, 0, K, BLOCK_N, FETCHED)
            fetch_rows(weight_ptr, size + row, 2 * size, 0, K, BLOCK_N, FETCHED)
        gdc_wait()
    gate = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    up = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    rest_gate = tl.zeros([BLOCK_N, REST], tl.float32)
    rest_up = tl.zeros([BLOCK_N, REST], tl.float32)
    for column in range(0, K, BLOCK_K):
        gate_rows = weight_desc.load([row, column])
        up_rows = weight_desc.load([size + row, column])
        x = x_desc.load([first_token, column]).T
        gate = tl.dot(gate_rows, x, gate)
        up = tl.dot(up_rows, x, up)
        if HAS_REST:
            rest = rest_desc.load([first_token + WIDTH, column]).T
            rest_gate = tl.dot(gate_rows, rest, rest_gate)
            rest_up = tl.dot(up_rows, rest, rest_up)
    if HAS_BIAS:
        gate_bias = tl.load(bias_ptr + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
        up_bias = tl.load(bias_ptr + size + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
        gate += gate_bias
        up += up_bias
        rest_gate += gate_bias
        rest_up += up_bias
    _store_gated(gate, up, out_ptr, first_token, num_tokens, n, size, WIDTH)
    if HAS_REST:
        _store_gated(rest_gate, rest_up, out_ptr, first_token + WIDTH, num_tokens, n, size, REST)


def split_k_partials(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Partial sums of ``x`` [T, K] times ``weight`` [N, K] transposed, float32 [splits, T, N]."""
    num_tokens, size = x.shape
    out_features = weight.shape[0]
    partials = torch.empty(tiling.splits, num_tokens, out_features, dtype=torch.float32, device=x.device)
    _split_k_kernel[(tiling.groups_of(num_tokens), triton.cdiv(out_features, tiling.block_n), tiling.splits)](
        *described(x, weight, tiling), weight, partials, num_tokens, out_features,
        K=size, SPLITS=tiling.splits, **constants(tiling), **launch_options(x),
    )  # fmt: skip
    return partials


def sum_partials(partials: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Sum [T, N] of ``partials`` [A, T, N] and the bias [N], in ``dtype``."""
    splits, num_tokens, out_features = partials.shape
    y = torch.empty(num_tokens, out_features, dtype=dtype, device=partials.device)
    _sum_partials_kernel[(triton.cdiv(y.numel(), _SUMMED),)](
        partials, y if bias is None else bias, y, y.numel(), out_features,
        HAS_BIAS=bias is not None, SPLITS=splits, BLOCK=_SUMMED, num_warps=8, **launch_options(partials),
    )  # fmt: skip
    return y


def gated_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling) -> torch.Tensor:
    """silu(gate) * up [T, N] of ``x`` [T, K] and ``weight`` [2 N, K], whose first half is the gate; K is not split."""
    num_tokens, size = x.shape
    out_features = weight.shape[0] // 2
    out = empty_rows(num_tokens, out_features, dtype=x.dtype, device=x.device)
    _split_k_gate_kernel[(tiling.groups_of(num_tokens), triton.cdiv(out_features, tiling.block_n))](
        *described(x, weight, tiling), weight, weight if bias is None else bias, out, num_tokens, out_features,
        K=size, HAS_BIAS=bias is not None, **constants(tiling), **launch_options(x),
    )  # fmt: skip
    return out


def rows_of_tiles(num_tokens: int, tiling: Tiling) -> int:
    """Rows of x that the programs of one tile of the weight load together."""
    return tiling.groups_of(num_tokens) * (tiling.width + tiling.rest)


def described(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of the two parts of ``x`` and of the weight."""
    x = with_room(x, rows_of_tiles(x.shape[0], tiling))
    blocks = ((x, tiling.width), (x, tiling.rest or _NO_WIDTH), (weight, tiling.block_n))
    return tuple(TensorDescriptor.from_tensor(tensor, [rows, tiling.block_k]) for tensor, rows in blocks)


def constants(tiling: Tiling) -> dict[str, Any]:
    """Tile sizes and compile options of a kernel."""
    return {
        "FETCHED": tiling.fetched,
        "WIDTH": tiling.width,
        "REST": tiling.rest or _NO_WIDTH,
        "HAS_REST": tiling.rest > 0,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
