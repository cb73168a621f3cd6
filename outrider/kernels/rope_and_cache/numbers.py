# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201, SIM300
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Numbers of the cache: what kernels store for keys and values."""

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
