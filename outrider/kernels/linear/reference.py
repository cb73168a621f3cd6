"""Contract of a prepared weight, with defaults for operations without a special kernel, and the weights that PyTorch
multiplies: plain, which runs on every device, upcast and packed.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F

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


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """True if this build of torch on this processor packs and multiplies weights of this type."""
    try:
        PackedWeight(torch.ones(2, 2, dtype=dtype))(torch.ones(1, 2, dtype=dtype), torch.ones(2, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True


class PackedWeight(PreparedWeight):
    """A weight packed once into oneDNN's blocked layout, on CPU.

    A plain float32 product of 3 to 8 rows packs its weight each time and takes two to three times as long as a product
    of one row. With a packed weight five rows take little longer than one, which makes scoring a draft cheap. The
    operators are those of torch's compiler; where they are missing or refuse a type, the plain product is used.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return product
