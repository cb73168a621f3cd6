# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, PLR0917, SIM300
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Heads in two halves: their angles, and the numbers that kernels store for them in the cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cache_numbers(x, is_key, inverse_key_scale, inverse_value_scale, DTYPE: tl.constexpr):
    """``x`` in the type of the cache; of FP8, multiplied by its inverse scale (None: both are 1) and in its range."""
    if DTYPE == tl.float8e4nv:
        wide = x.to(tl.float32)
        if inverse_key_scale is not None:
            wide *= tl.where(is_key, inverse_key_scale, inverse_value_scale)
        return tl.minimum(tl.maximum(wide, -448.0), 448.0).to(DTYPE)
    else:  # noqa: RET505 - of two constants, the compiler sees one branch
        return x.to(DTYPE)


@triton.jit
def store_halves(pointers, first, second, mask, HALF: tl.constexpr):
    """Store the halves of heads; ``pointers`` are to the first ones."""
    tl.store(pointers, first.to(pointers.dtype.element_ty), mask=mask)
    tl.store(pointers + HALF, second.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def store_in_cache(pointers, first, second, is_key, inverse_key_scale, inverse_value_scale, mask, HALF: tl.constexpr):
    """Store the halves of keys or values as ``cache_numbers``."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    tl.store(pointers, cache_numbers(first, is_key, inverse_key_scale, inverse_value_scale, dtype), mask=mask)
    tl.store(pointers + HALF, cache_numbers(second, is_key, inverse_key_scale, inverse_value_scale, dtype), mask=mask)


@triton.jit
def angles_at(
    cos_ptr, sin_ptr, rows_ptr, token, place, inside, HAS_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Cosines and sines of a token at places of a head's first half, float32."""
    row = tl.load(rows_ptr + token).to(tl.int64) if HAS_ROWS else token
    cos = tl.load(cos_ptr + row * HEAD_DIM + place, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * HEAD_DIM + HEAD_DIM // 2 + place, mask=inside, other=0.0).to(tl.float32)
    return cos, sin
