"""What a figure is lately. Owns no figure."""

from __future__ import annotations


def moving_mean(mean: float | None, value: float, weight: float) -> float:
    """The mean once ``value`` was seen, which counts for ``weight`` of it; of none before, the value."""
    return value if mean is None else mean + weight * (value - mean)
