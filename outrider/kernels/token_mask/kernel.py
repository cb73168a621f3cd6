# Triton compiles the annotations of a kernel along with it, so kernels have none.
# ruff: noqa: ANN001, ANN202, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, unused-ignore"
"""``mask_tokens`` as one Triton kernel, which writes refused logits alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.launching import launch_options
from outrider.kernels.token_mask.reference import REFUSED

_BLOCK = 4096
_REFUSED = tl.constexpr(REFUSED)


@triton.jit(do_not_specialize=["num_words"])
def _mask_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [N] int32
    words_ptr,  # [N, W] int32
    stride,
    num_tokens,
    num_words,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(1)
    row = tl.load(rows_ptr + place).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + place.to(tl.int64) * num_words + (ids >> 5), mask=(ids >> 5) < num_words, other=0)
    is_refused = ((word >> (ids & 31)) & 1) == 0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    is_refused &= ids < num_tokens
    pointers = logits_ptr + row * stride + ids
    is_refused &= tl.abs(tl.load(pointers, mask=is_refused, other=0.0).to(tl.float32)) < float("inf")
    tl.store(pointers, tl.full([BLOCK], _REFUSED, tl.float32).to(logits_ptr.dtype.element_ty), mask=is_refused)


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Mask ``rows`` [N] of ``logits`` [R, V] by ``words`` [N, W], in place."""
    if not len(rows):
        return
    vocab_size = logits.shape[-1]
    _mask_kernel[(triton.cdiv(vocab_size, _BLOCK), len(rows))](
        logits, rows, words, logits.stride(0), vocab_size, words.shape[1], BLOCK=_BLOCK, **launch_options(logits)
    )
