"""Token masks: refused tokens of rows of logits.

Contract: ``mask_tokens(logits, rows, words)`` takes ``logits [R, V]`` bfloat16 or float32, ``rows [N] int32`` of them
and ``words [N, W] int32``. Bit i of word w is set if token 32 * w + i is allowed. It sets all other finite logits of
these rows to ``REFUSED``, which the scoring kernels take for no logit at all, and leaves all else as it is: what is not
finite is to be found by them.
"""

from __future__ import annotations

import torch

from outrider.kernels.launching import has_kernels
from outrider.kernels.token_mask import reference
from outrider.kernels.token_mask.reference import REFUSED

__all__ = ["REFUSED", "mask_tokens"]


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Mask ``rows`` [N] of ``logits`` [R, V] by ``words`` [N, W], in place."""
    if has_kernels(logits.device):
        from outrider.kernels.token_mask import kernel  # Triton is slow to import

        kernel.mask_tokens(logits, rows, words)
    else:
        reference.mask_tokens(logits, rows, words)
