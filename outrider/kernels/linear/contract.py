"""Contract of a prepared weight, with defaults for operations without a special kernel."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch

from outrider.kernels.swiglu import swiglu


class PreparedWeight(Protocol):
    """A weight that is ready for products."""

    @property
    def matrix(self) -> torch.Tensor | None:
        """The original weight [N, K], if the kernels of ``gemv`` can read it."""
        return None

    @abstractmethod
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        ...

    def partials(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 partials [A, T, N] whose sum over A is the product."""
        return self(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to silu(gate) * up [T, N / 2] of the two halves of the product."""
        return swiglu(self(x, bias))
