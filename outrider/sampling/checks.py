"""Checks of rows of logits before a token is drawn: non-finite logits, and rows with every token masked.

Shape letters: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import InvalidRequestError, NonFiniteLogitsError, OutriderError


def row_errors(logits: Tensor, largest: Tensor) -> list[OutriderError | None]:  # [N, V] raw, [N] largest processed
    """Error of each row, or None: ``NonFiniteLogitsError``, or ``InvalidRequestError`` if no token can be drawn."""
    finite = _finite_rows(logits)
    maxima = largest.tolist()
    return [row_error(finite=ok, largest=maximum) for ok, maximum in zip(finite, maxima, strict=True)]


def _finite_rows(logits: Tensor) -> list[bool]:
    """True where a row is finite. A finite sum proves it at a tenth of the cost of checking every element."""
    sums: list[bool] = logits.sum(-1).isfinite().tolist()
    if all(sums):
        return sums
    exact: list[bool] = torch.isfinite(logits).all(-1).tolist()
    return exact


def row_error(*, finite: bool, largest: float) -> OutriderError | None:
    """Error of one row, from whether its raw logits are finite and from its largest processed logit; None if sound."""
    if not finite:
        return NonFiniteLogitsError("the model gave NaN or infinite logits for this session")
    if largest == float("-inf"):
        return InvalidRequestError(
            "sampling",
            "leaves no token to draw: allowed, banned and bad tokens and the grammar together exclude every one",
        )
    if not abs(largest) < float("inf"):
        return InvalidRequestError("sampling", "drives the logits past what float32 can hold")
    return None
