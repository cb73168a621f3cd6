"""Readings: counters and histograms of a running process, as plain numbers.

Owns histograms with updates of a fraction of a microsecond, and the form in which values are handed over.
``outrider.telemetry.metrics.catalogue`` explains the names.

One thread updates a histogram; any thread may read it, and may miss an update in progress.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

STAGE_SECONDS = (
    0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075,
    0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
"""Bounds for the stages of a step, which often take less than a millisecond."""
TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
"""Bounds for the time of a token."""
REQUEST_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
"""Bounds for times of a whole request."""
AMOUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
"""Bounds for sequences and tokens."""
LENGTHS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
)  # fmt: skip
"""Bounds for lengths of prompts and outputs, in tokens."""


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """Values of a histogram at one moment."""

    bounds: tuple[float, ...]
    """Upper bounds, each included in its bucket; one more bucket is without bound."""
    counts: tuple[int, ...]  # [len(bounds) + 1] observations in each bucket alone
    total: float
    """Sum of all observations."""

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class Histogram:
    """Observations counted in buckets."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count an observation, or as many equal ones."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def read(self) -> HistogramReading:
        """Histogram as counted so far."""
        return HistogramReading(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class Reading:
    """One value under its name in the catalogue."""

    name: str
    value: float | HistogramReading
    labels: tuple[tuple[str, str], ...] = ()
    """(name, value), in the catalogue's order."""


def each(name: str, label: str, values: Iterable[tuple[str, float]]) -> list[Reading]:
    """One reading for each (label value, number)."""
    return [Reading(name, value, ((label, str(key)),)) for key, value in values]
