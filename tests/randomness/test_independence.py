"""Crude statistics: numbers are uniform, and streams, seeds, bases, positions and tokens do not know of each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from outrider.randomness.philox_numpy import gumbel, uniform
from outrider.randomness.streams import Stream

COUNT = 20_000
SEED = 20_240_229


@pytest.mark.parametrize("stream", list(Stream))
def test_uniform_along_positions(stream: Stream) -> None:
    values = uniform(SEED, stream, 0, np.arange(COUNT))
    observed, _ = np.histogram(values, bins=50, range=(0, 1))
    assert stats.chisquare(observed).pvalue > 1e-4


def test_uniform_along_tokens() -> None:
    observed, _ = np.histogram(uniform(SEED, Stream.COUPLED, 0, 5, np.arange(COUNT)), bins=50, range=(0, 1))
    assert stats.chisquare(observed).pvalue > 1e-4


def pairs() -> list[tuple[str, np.ndarray, np.ndarray]]:
    positions = np.arange(COUNT)
    of_streams = {stream: uniform(SEED, stream, 0, positions) for stream in Stream}
    found = [(f"{a.name} and {b.name}", of_streams[a], of_streams[b]) for a, b in itertools.combinations(of_streams, 2)]
    first = of_streams[Stream.PROPOSAL]
    found.append(("neighbouring positions", first[:-1], first[1:]))
    found.append(("neighbouring seeds", first, uniform(SEED + 1, Stream.PROPOSAL, 0, positions)))
    found.append(("seeds 2**32 apart", first, uniform(SEED + 2**32, Stream.PROPOSAL, 0, positions)))
    found.append(("neighbouring bases", first, uniform(SEED, Stream.PROPOSAL, 1, positions)))
    found.append(("neighbouring tokens", first, uniform(SEED, Stream.PROPOSAL, 0, positions, 1)))
    found.append(("neighbouring blocks", first, uniform(SEED, Stream.PROPOSAL, 0, positions, 4)))
    return found


@pytest.mark.parametrize(("name", "left", "right"), pairs(), ids=lambda value: value if isinstance(value, str) else "")
def test_no_correlation(name: str, left: np.ndarray, right: np.ndarray) -> None:
    assert abs(np.corrcoef(left, right)[0, 1]) < 4.5 / np.sqrt(len(left)), name
    table, _, _ = np.histogram2d(left, right, bins=10, range=((0, 1), (0, 1)))
    assert stats.chisquare(table.ravel()).pvalue > 1e-4, name


def test_gumbel_noise_has_its_law() -> None:
    noise = gumbel(SEED, Stream.COUPLED, 0, np.arange(COUNT), 3)
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-4
