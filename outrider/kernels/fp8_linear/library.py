"""Products of many rows by PyTorch's library (``torch._scaled_mm``, which is cuBLAS).

Inputs and numbers are those of ``kernel``, sums are in an order that may depend on the number of rows.
"""

from __future__ import annotations

import torch

from outrider.kernels.fp8_linear.layout import Fp8Matrix, Rounded, Rounding
from outrider.kernels.room import with_room

_BLOCK = 128
_ALIGNED = 16
"""Rows and columns of a weight are a multiple of it."""
_BLOCKS_ALIGNED = 4
"""Blocks in a row of a weight's scales."""
_BLOCKS_CAPABILITY, _BLOCKS_CUDA = 9, (12, 9)


def library_takes(matrix: Fp8Matrix, rounding: Rounding, dtype: torch.dtype) -> bool:
    """True if the library computes products with this weight: of rounded inputs, scales of rows or of square blocks."""
    num_rows, size = matrix.numbers.shape
    if matrix.numbers.device.type != "cuda" or dtype != torch.bfloat16 or num_rows % _ALIGNED or size % _ALIGNED:
        return False
    if matrix.columns < size:
        has_blocks = matrix.rows == matrix.columns == rounding.group == _BLOCK
        return has_blocks and size % (_BLOCK * _BLOCKS_ALIGNED) == 0 and _takes_blocks(matrix.numbers.device)
    return matrix.rows == 1 and (rounding.scale is not None or (rounding.group or 0) >= size)


def _takes_blocks(device: torch.device) -> bool:
    """True on GPUs of capability 9.x with CUDA 12.9 or later; elsewhere the library refuses scales of blocks."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device)[0] == _BLOCKS_CAPABILITY and version >= _BLOCKS_CUDA


def library_product(x: Rounded, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [T, K] by the ``matrix`` [N, K]: [T, N] of ``dtype``. Of as many rows as there are scales, at least T."""
    num_tokens, numbers = x.numbers.shape[0], x.numbers
    if x.scales is None:
        scales = torch.ones(num_tokens, 1, dtype=torch.float32, device=numbers.device)
    else:
        scales, numbers = x.scales.T, with_room(numbers, x.scales.shape[1])
    product = torch._scaled_mm(
        numbers, matrix.numbers.T, scale_a=scales, scale_b=matrix.scales.T, bias=bias, out_dtype=dtype,
        use_fast_accum=matrix.columns >= matrix.numbers.shape[1],
    )  # fmt: skip
    return product[:num_tokens]
