# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""The random streams inside Triton kernels: device functions, and one kernel that writes rows of them.

``philox_lanes`` gives the same bits as every other form; ``gumbel_of_bits`` the same noise up to a few units in the
last place (a kernel has no ``log1p``: a short series and Kahan's correction stand in for it). Kernels that sample
include these functions; ``row_bits`` and ``row_gumbel`` are there to test them and to be read first.

Triton is optional: nothing else imports this module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.randomness.philox_torch import StreamRows
from outrider.randomness.streams import LANES, LARGEST_UNIT, UNIT

_UNIT = tl.constexpr(UNIT)
_LARGEST_UNIT = tl.constexpr(LARGEST_UNIT)
_LANES = tl.constexpr(LANES)
_BLOCKS_PER_PROGRAM = 256


@triton.jit
def philox_lanes(
    key_low,
    key_high,
    position,
    base,
    stream,
    blocks,
):
    """The four lanes of bits, uint32, of Philox blocks ``blocks`` (token >> 2); the other arguments are scalars."""
    seed = (key_high.to(tl.uint64) << 32) | key_low.to(tl.uint64)
    zero = blocks.to(tl.uint32) * 0
    c1 = zero + position.to(tl.uint32)
    c2 = zero + base.to(tl.uint32)
    c3 = zero + stream.to(tl.uint32)
    return tl.philox(seed, blocks.to(tl.uint32), c1, c2, c3)


@triton.jit
def gumbel_of_bits(bits):
    """Gumbel noise, float32, of bits, uint32: ``-log(-log1p(-u))``."""
    unit = tl.minimum((bits.to(tl.float32) + 0.5) * _UNIT, _LARGEST_UNIT)
    # Near 0, where winners sit: the series of -log1p(-u); its next term is under a half unit in the last place.
    tail = 1.0 / 3.0 + unit * (0.25 + unit * (0.2 + unit * (1.0 / 6.0)))
    series = unit + unit * unit * (0.5 + unit * tail)
    # Elsewhere the rounding of 1 - u is undone: log(w) * u / (1 - w), where 1 - w is exact.
    rest = 1.0 - tl.maximum(unit, 0.0625)
    corrected = -tl.log(rest) * tl.maximum(unit, 0.0625) / (1.0 - rest)
    return -tl.log(tl.where(unit < 0.0625, series, corrected))


@triton.jit
def row_kernel(
    words_ptr,  # [5, N] int64
    bits_ptr,  # [N, V] int64
    gumbel_ptr,  # [N, V] float32
    num_rows,
    num_tokens,
    BLOCKS: tl.constexpr,
):
    """Bits and noise of rows by their words; a program has ``BLOCKS`` blocks of lanes of a row."""
    row = tl.program_id(0)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    key_low = tl.load(words_ptr + row)
    key_high = tl.load(words_ptr + num_rows + row)
    position = tl.load(words_ptr + 2 * num_rows + row)
    base = tl.load(words_ptr + 3 * num_rows + row)
    stream = tl.load(words_ptr + 4 * num_rows + row)
    lanes = philox_lanes(key_low, key_high, position, base, stream, blocks)
    for lane in tl.static_range(_LANES):
        tokens = blocks * _LANES + lane
        places = row.to(tl.int64) * num_tokens + tokens
        bits = lanes[lane]
        tl.store(bits_ptr + places, bits.to(tl.int64), mask=tokens < num_tokens)
        tl.store(gumbel_ptr + places, gumbel_of_bits(bits), mask=tokens < num_tokens)


def row_bits_and_gumbel(rows: StreamRows, num_tokens: int) -> tuple[Tensor, Tensor]:  # [N, V] int64, float32
    """Bits and Gumbel noise of rows, as ``philox_torch.row_bits`` and ``row_gumbel``, by one kernel."""
    shape, device = (len(rows), num_tokens), rows.words.device
    bits = torch.empty(shape, dtype=torch.int64, device=device)
    noise = torch.empty(shape, dtype=torch.float32, device=device)
    grid = (len(rows), triton.cdiv(triton.cdiv(num_tokens, LANES), _BLOCKS_PER_PROGRAM))
    words = rows.words.squeeze(-1).contiguous()
    row_kernel[grid](words, bits, noise, len(rows), num_tokens, BLOCKS=_BLOCKS_PER_PROGRAM)
    return bits, noise
