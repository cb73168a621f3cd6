"""Weights packed once for oneDNN on CPU.

A plain float32 product of 3 to 8 rows packs its weight each time and takes two to three times as long as a product of
one row. With a packed weight five rows take little longer than one, which makes scoring a draft cheap. The operators
are those of torch's compiler; where they are missing or refuse a type, the plain product is used.
"""

from __future__ import annotations

import functools

import torch

from outrider.kernels.linear.contract import PreparedWeight


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """True if this build of torch on this processor packs and multiplies weights of this type."""
    try:
        PackedWeight(torch.ones(2, 2, dtype=dtype))(torch.ones(1, 2, dtype=dtype), torch.ones(2, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True


class PackedWeight(PreparedWeight):
    """The weight in oneDNN's blocked layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return product
