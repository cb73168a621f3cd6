"""PyTorch reference of ``mask_tokens``; runs on every device."""

from __future__ import annotations

import torch

REFUSED = -(2.0**101)
"""Value below every logit that can be drawn, exact in bfloat16, and finite: it does not pass for a flaw of the model.
"""
_WORD_BITS = 32


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Mask ``rows`` [N] of ``logits`` [R, V] by ``words`` [N, W], in place."""
    bits = torch.ones((), dtype=torch.int32, device=words.device) << torch.arange(
        _WORD_BITS, dtype=torch.int32, device=words.device
    )
    allowed = ((words.unsqueeze(-1) & bits) != 0).flatten(1)[:, : logits.shape[-1]]  # [N, V] at most
    chosen = rows.long()
    is_kept = ~logits[chosen].isfinite()
    is_kept[:, : allowed.shape[1]] |= allowed
    logits[chosen] = logits[chosen].masked_fill(~is_kept, REFUSED)
