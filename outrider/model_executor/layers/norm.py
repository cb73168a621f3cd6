"""A normalisation layer: owns one weight from the moment it is empty until it is prepared for its device."""

from __future__ import annotations

import torch

from outrider.kernels.rms_norm import PreparedNorm, prepare_norm


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * w. ``weight`` is filled by the loader; ``prepare`` then makes it ready to
    compute.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)  # [N]
        self.eps = eps
        self._prepared: PreparedNorm | None = None

    def prepare(self) -> PreparedNorm:
        """Turn the loaded weight into the form that computes fastest."""
        if self._prepared is None:
            self._prepared = prepare_norm(self.weight, self.eps)
        return self._prepared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, N] to the same shape."""
        return (self._prepared or self.prepare())(x)

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` [T, N], or partials [A, T, N], to ``x`` [T, N] in place and normalise the sum."""
        return (self._prepared or self.prepare()).after_adding(x, delta)
