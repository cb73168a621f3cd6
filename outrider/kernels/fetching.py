# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""Prefetch: a device function for kernels that start before their inputs are complete."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch_ahead(pointers):
    """Prefetch the 128 bytes around each pointer into the L2 cache; returns at once."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
