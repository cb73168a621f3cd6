"""What keeps a row from being drawn from: logits that are not finite, and nothing left to draw.

Shape letters: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import InvalidRequestError, NonFiniteLogitsError, OutriderError


def row_errors(logits: Tensor, largest: Tensor) -> list[OutriderError | None]:  # [N, V] raw, [N] largest processed
    """For each row what is wrong with it, if anything."""
    finite = _finite_rows(logits)
    maxima = largest.tolist()
    return [row_error(finite=ok, largest=maximum) for ok, maximum in zip(finite, maxima, strict=True)]


def _finite_rows(logits: Tensor) -> list[bool]:
    """A finite sum proves a finite row at a tenth of the price of looking at every element."""
    sums: list[bool] = logits.sum(-1).isfinite().tolist()
    if all(sums):
        return sums
    exact: list[bool] = torch.isfinite(logits).all(-1).tolist()
    return exact


def row_error(*, finite: bool, largest: float) -> OutriderError | None:
    """What keeps one row from being drawn from: whether its raw logits are finite, and its largest processed one."""
    if not finite:
        return NonFiniteLogitsError("the model gave NaN or infinite logits for this session")
    if largest == float("-inf"):
        return InvalidRequestError(
            "sampling", "leaves no token to draw: allowed, banned and bad tokens together exclude every one"
        )
    if not abs(largest) < float("inf"):
        return InvalidRequestError("sampling", "drives the logits past what float32 can hold")
    return None
