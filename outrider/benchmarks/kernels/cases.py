"""A kernel to be measured: its work, what it must at least move, and how far its answer is from a reference.

Owns the type and what all cases share. Where inputs would fit a device's cache but do not in service, a case has
several sets and goes through them in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel at one size."""

    name: str
    size: str
    """Size in words, for tables."""
    num_bytes: int
    """Inputs read once and outputs written once."""
    work: Callable[[int], object]
    """The n-th go."""
    difference: Callable[[], float]
    """Distance from the reference relative to the reference's norm; or the share of answers that differ."""
    tolerance: float
    is_capturable: bool = True
    """True if it makes no decision on the host, so that a CUDA graph can hold it."""


@dataclass(frozen=True, slots=True)
class KernelPlace:
    """Device and type with which kernels run."""

    device: torch.device
    dtype: torch.dtype

    @property
    def is_large(self) -> bool:
        """True if to take the sizes of real models: on a CPU they would take minutes."""
        return self.device.type == "cuda"

    def random(self, *shape: int) -> torch.Tensor:
        """Normal noise."""
        return torch.randn(*shape, device=self.device).to(self.dtype)


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; infinite for what is not finite."""
    wide = truth.double()
    error = float((found.double() - wide).norm() / wide.norm())
    return error if math.isfinite(error) else math.inf
