"""A linear layer: the seam behind which weights may be packed, quantised or split over devices.

Owns one weight from the moment it is empty until it is prepared for its device. Refuses to know what it is a part of.
"""

from __future__ import annotations

import torch

from outrider.kernels.few_tokens import Matrix
from outrider.kernels.linear import PreparedWeight, prepare_weight

_MAX_SECOND_COPY_BYTES = 64 << 20


class Linear:
    """y = x W^T (+ b). ``weight`` is filled by the loader; ``prepare`` then makes it ready to compute."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: torch.Tensor | None = None,
    ) -> None:
        self.weight = (
            tied_to if tied_to is not None else torch.empty(out_features, in_features, dtype=dtype, device=device)
        )
        """[N, K]; of no use once prepared."""
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._is_tied = tied_to is not None
        self._prepared: PreparedWeight | None = None

    def prepare(self) -> PreparedWeight:
        """Turn the loaded weight into the form that computes fastest, letting go of the loaded one."""
        if self._prepared is None:
            self._prepared = prepare_weight(self.weight, keep_layout=self._is_tied and not _is_small(self.weight))
            self.weight = torch.empty(0)
        return self._prepared

    @property
    def matrix(self) -> Matrix | None:
        """Weight and bias for kernels that take several steps at once; None where they are not to be had."""
        weight = None if self._prepared is None else self._prepared.matrix
        return None if weight is None else Matrix(weight, self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        return (self._prepared or self.prepare())(x, self.bias)

    def addends(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 [A, T, N] whose sum over A that is, for ``RmsNorm.after_adding``."""
        return (self._prepared or self.prepare()).addends(x, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to silu(gate) * up [T, N / 2], the product's first half being the gate."""
        return (self._prepared or self.prepare()).gated(x, self.bias)


def _is_small(weight: torch.Tensor) -> bool:
    """A tied weight is still needed as it is, to look up rows: packing it costs a second copy, worth it for small
    ones only.
    """
    return weight.nbytes <= _MAX_SECOND_COPY_BYTES
