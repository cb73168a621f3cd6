"""A normalisation layer: owns one weight from the moment it is empty until it is prepared for its device."""

from __future__ import annotations

import torch

from outrider.kernels.rms_norm import PreparedNorm, prepare_norm
from outrider.model_executor.layers.contract import WeightTarget


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * w. ``weight`` is filled by the loader; ``prepare`` then makes it ready to
    compute.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: float = 0.0) -> None:
        """``offset`` is added to the weight on file; the sum is kept in float32."""
        self.weight = torch.empty(size, dtype=norm_dtype(dtype, offset), device=device)  # [N]
        self.eps = eps
        self._dtype = dtype
        self._offset = offset
        self._prepared: PreparedNorm | None = None

    def target(self) -> WeightTarget:
        """Destination of the weight on file."""
        return norm_target(self.weight, self._offset)

    def prepare(self) -> PreparedNorm:
        """Turn the loaded weight into the form that computes fastest."""
        if self._prepared is None:
            self._prepared = prepare_norm(self.weight, self.eps, self._dtype)
        return self._prepared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, N] to the same shape."""
        return (self._prepared or self.prepare())(x)

    def after_adding(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add ``delta`` [T, N], or partials [A, T, N], to ``x`` [T, N] in place and normalise the sum."""
        return (self._prepared or self.prepare()).after_adding(x, delta)


def norm_dtype(dtype: torch.dtype, offset: float) -> torch.dtype:
    """Type in which a norm's weight is kept: with an ``offset`` at least float32, which does not round the sum."""
    return torch.promote_types(dtype, torch.float32) if offset else dtype


def norm_target(weight: torch.Tensor, offset: float, order: tuple[int, ...] = ()) -> WeightTarget:
    """Destination of a norm's weight on file, [N], to which ``offset`` is added; ``weight`` is [..., N]. ``order`` is
    that of its features, empty: the one on file.
    """
    shape = tuple(weight.shape[-1:])
    if not offset and not order:
        return WeightTarget(weight, shape)
    places = list(order) or slice(None)
    return WeightTarget(weight, shape, writer=lambda content: weight.copy_(content.to(weight.dtype)[places] + offset))
