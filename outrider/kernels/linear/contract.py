"""What a prepared weight does, with the plain way for what it has no better one for."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch

from outrider.kernels.swiglu import swiglu


class PreparedWeight(Protocol):
    """A weight ready to be multiplied with."""

    @property
    def matrix(self) -> torch.Tensor | None:
        """[N, K] as it was, where the kernels of ``few_tokens`` can read it."""
        return None

    @abstractmethod
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        ...

    def addends(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 [A, T, N] whose sum over A that is, left to who reads it."""
        return self(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to silu(gate) * up [T, N / 2] of the product's two halves."""
        return swiglu(self(x, bias))
