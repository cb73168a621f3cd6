# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""MXFP4 weights on a GPU: their form in memory, and sums of their columns.

Four numbers, one of each group of 32 columns of a block of 128, share 16 bits, so that a register of two such words
becomes two neighbouring columns of each group with few instructions: a shift moves the bits of a number to where
bfloat16 has sign, two bits of the exponent and one of the fraction, and one multiplication corrects the exponent and
applies the group's scale. Groups are thus operands of the matrix unit of their own, in the order of the columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from outrider.kernels.experts.layout import Mxfp4Matrix

BLOCK_K = 128
"""Columns of four groups."""
_GROUP = 32
_SCALES = (34, 160)
"""Exponents, + 127, of scales; others are as good as none. A widened number is 2 ** -32 of what it is."""
_SCALE_OFFSET = 94
_PACKED_ROWS = 8192
"""Rows widened at once, which bounds memory."""
_PLACES = (
    ((15, 0), (8, 0), (7, 0), (6, 0)),
    ((15, -3), (8, -3), (7, -3), (6, -3)),
    ((15, -6), (8, -6), (7, -6), (6, -6)),
    ((15, -1), (8, 3), (7, 3), (6, 7)),
)
"""Bits of each group's numbers: (bit of bfloat16, places to the left at which the word has it), from the sign on."""
_CONVERSION = tl.constexpr("""{
    .reg .b32 t, u, zero;
    mov.b32 zero, 0x80008000;
    and.b32 t, $4, 0x81C081C0;
    fma.rn.bf16x2 $0, t, $5, zero;
    shl.b32 t, $4, 3;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $1, t, $7, zero;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $2, t, $9, zero;
    shl.b32 t, $4, 1;
    and.b32 t, t, 0x80008000;
    shr.b32 u, $4, 3;
    lop3.b32 t, u, 0x01800180, t, 0xEA;
    shr.b32 u, $4, 7;
    lop3.b32 t, u, 0x00400040, t, 0xEA;
    fma.rn.bf16x2 $3, t, $11, zero;
}""")


def packed(matrix: Mxfp4Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Words [R, K / 4] int16 and scales of four groups each [K / 128, R] int32, K rounded up to whole blocks."""
    rows, size = matrix.numbers.shape[0], 2 * matrix.numbers.shape[1]
    blocks = -(-size // BLOCK_K)
    words = torch.empty(rows, blocks, _GROUP, dtype=torch.int16, device=matrix.numbers.device)
    for numbers, target in zip(matrix.numbers.split(_PACKED_ROWS), words.split(_PACKED_ROWS), strict=True):
        codes = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
        codes = F.pad(codes, (0, blocks * BLOCK_K - size)).view(-1, blocks, 4, _GROUP).int()
        word = torch.zeros_like(codes[:, :, 0])
        for group, places in enumerate(_PLACES):
            for bit, (place, shift) in enumerate(places):
                word |= (codes[:, :, group] >> (3 - bit) & 1) << (place + shift)
        target.copy_(word.to(torch.int16))
    scales = matrix.scales.clamp(*_SCALES).add_(_SCALE_OFFSET)
    scales = F.pad(scales, (0, blocks * 4 - scales.shape[1])).contiguous().view(torch.int32)
    return words.flatten(1), scales.T.contiguous()


@triton.jit
def _multiplier(scales, group: tl.constexpr):
    """Multiplier of the numbers of a group, as two bfloat16 in 32 bits."""
    return ((scales >> (8 * group)) & 255) * 0x00800080


@triton.jit
def _widened(word, scales, group: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of a group, without the instructions of ``_CONVERSION``."""
    bits = (word << (3 * group)) & 0x81C0
    if group == 3:
        bits = ((word << 1) & 0x8000) | ((word >> 3) & 0x0180) | ((word >> 7) & 0x0040)
    small = (bits << 16).to(tl.float32, bitcast=True) * (2.0**126)
    scale = ((((scales >> (8 * group)) & 255) - 94) << 23).to(tl.float32, bitcast=True)
    return (small * scale).to(DTYPE)


@triton.jit
def sum_mxfp4_columns(
    x_rows, word_rows, scales_ptr, scale_stride,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, IS_FAST: tl.constexpr,
):  # fmt: skip
    """Product of a tile [BLOCK_N, WIDTH] of rows [BLOCK_N, 1] and [WIDTH, 1] of pointers."""
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for block in range(0, (K + 127) // 128):
        word = tl.load(word_rows + (block * 32 + tl.arange(0, 32))[None, :])
        scales = tl.load(scales_ptr + block * scale_stride)[:, None]
        k = (block * 128 + tl.arange(0, 128))[None, :]
        x = tl.load(x_rows + k, mask=k < K, other=0.0)
        if IS_FAST:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                _CONVERSION, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
                [word, _multiplier(scales, 0), _multiplier(scales, 1), _multiplier(scales, 2), _multiplier(scales, 3)],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            wide = word.to(tl.int32)
            w0, w1 = _widened(wide, scales, 0, x.dtype), _widened(wide, scales, 1, x.dtype)
            w2, w3 = _widened(wide, scales, 2, x.dtype), _widened(wide, scales, 3, x.dtype)
        halves = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [N, 32, 2, 2]: groups 0, 1, 2, 3
        weight = tl.reshape(tl.permute(halves, (0, 2, 3, 1)), [BLOCK_N, 128])
        total = tl.dot(weight, x.T, total, input_precision="ieee")
    return total * 4294967296.0 if IS_FAST else total
