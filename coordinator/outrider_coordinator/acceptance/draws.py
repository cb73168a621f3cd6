"""Random draws of the coordinator: acceptance coins, and the draw from a residual.

Owns the stream and key of each draw. Streams are independent, keyed by (seed, stream, base, position), and never
shared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.randomness import scalar
from outrider.randomness.streams import Stream

DoubleArray = NDArray[np.float64]


def coin(seed: int, base: int, position: int) -> float:
    """The acceptance coin of the draft token at ``position``, in [0, 1)."""
    return scalar.coin(seed, Stream.ACCEPTANCE, base, position)


def draw(seed: int, base: int, position: int, weights: DoubleArray) -> int:
    """An index drawn in proportion to ``weights`` [N], whose sum is above 0; a weight of 0 is never drawn."""
    cumulative = weights.cumsum()
    point = scalar.coin(seed, Stream.RESIDUAL, base, position) * cumulative[-1]
    # The first index whose running sum is above the point: past every weight of 0. The clamp is for a product that
    # rounds up to the whole sum.
    index = int(cumulative.searchsorted(point, side="right"))
    return index if index < weights.shape[0] else int(np.flatnonzero(weights)[-1])
