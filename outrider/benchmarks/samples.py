"""Samples and what is said of them.

Owns the arithmetic from raw samples to medians and percentiles. Every figure that is printed or tabulated comes from
here; none is stored that cannot be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Statistics:
    """Summary of one series of samples, in its unit."""

    count: int
    mean: float
    std: float
    """Standard deviation of the samples as they are (divided by n)."""
    median: float
    p90: float
    p99: float
    minimum: float
    maximum: float


def statistics_of(samples: Sequence[float]) -> Statistics | None:
    """The statistics; None of no samples. Percentiles lie between samples linearly."""
    if not samples:
        return None
    values = np.asarray(samples, dtype=np.float64)
    median, p90, p99 = (float(value) for value in np.percentile(values, [50, 90, 99]))
    return Statistics(
        count=len(samples),
        mean=float(values.mean()),
        std=float(values.std()),
        median=median,
        p90=p90,
        p99=p99,
        minimum=float(values.min()),
        maximum=float(values.max()),
    )


def thinned(samples: Sequence[float], most: int) -> tuple[float, ...]:
    """Samples, at most ``most``, evenly spaced in order of size; few samples keep their own order."""
    if len(samples) <= most:
        return tuple(samples)
    places = np.linspace(0, len(samples) - 1, most).round().astype(int)
    return tuple(np.sort(np.asarray(samples, dtype=np.float64))[places].tolist())


def median(samples: Sequence[float]) -> float | None:
    """The median; None of no samples."""
    found = statistics_of(samples)
    return None if found is None else found.median


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """A quotient; None where either is missing or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator
