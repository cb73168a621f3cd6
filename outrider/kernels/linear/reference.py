"""PyTorch reference of ``linear``; runs on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.kernels.linear.contract import PreparedWeight


class PlainWeight(PreparedWeight):
    """The unchanged weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight  # [N, K]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        return F.linear(x, self._weight, bias)


class UpcastWeight(PreparedWeight):
    """A bfloat16 weight on a processor without bfloat16 arithmetic.

    There a product of many rows costs four times what it costs in float32 with the weight converted first; of few rows
    it is the other way round.
    """

    _MANY_ROWS = 8

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight  # [N, K] bf16

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        if x.shape[0] < self._MANY_ROWS:
            return F.linear(x, self._weight, bias)
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), self._weight.float(), wide_bias).to(x.dtype)
