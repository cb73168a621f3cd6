"""Least squares that forgets: a linear model of a time, fitted to the observations made lately.

Owns the normal equations, the prior that stands in where observations say nothing, and what is left out as an outlier.
Knows no clock: the unit of memory is an observation. Plain numbers, not arrays: with two or three features a call into
numpy takes longer than the arithmetic, and every round of a target makes some of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

_NOISE = 0.1
"""Standard deviation of an observation, as a share of what is usual: the prior is weighed against it."""
_OUTLIER = 3.0
"""An observation so many times the expected one is left out, unless several come in a row."""
_MAX_OUTLIERS_IN_A_ROW = 4
_MIN_OBSERVATIONS = 8
"""No observation is an outlier before so many were made."""


class LinearFit:
    """``y = coefficients . x`` with coefficients that are not negative, the intercept's feature first.

    ``prior`` and ``spread`` give each coefficient's mean and standard deviation as shares of a usual ``y``. They decide
    what no observation has told apart, such as the cost of a token while every forward has equally many.
    """

    def __init__(self, prior: Sequence[float], spread: Sequence[float], *, memory: float = 100.0) -> None:
        """``memory``: observations after which one counts for a third."""
        self._prior = tuple(prior)
        self._precision = tuple((_NOISE / each) ** 2 for each in spread)
        self._keep = math.exp(-1.0 / memory)
        self._gram = [[0.0] * len(prior) for _ in prior]
        self._moment = [0.0] * len(prior)
        self._scale = 0.0
        self._num_outliers = 0
        self._coefficients: tuple[float, ...] | None = None
        self.num_observations = 0

    def note(self, features: Sequence[float], value: float) -> None:
        """One observation."""
        if self._is_outlier(features, value):
            return
        keep = self._keep
        self._gram = [
            [keep * entry + x * y for entry, y in zip(row, features, strict=True)]
            for row, x in zip(self._gram, features, strict=True)
        ]
        self._moment = [keep * entry + value * x for entry, x in zip(self._moment, features, strict=True)]
        weight = max(1.0 - keep, 1.0 / (self.num_observations + 1))
        self._scale += weight * (abs(value) - self._scale)
        self.num_observations += 1
        self._coefficients = None

    def fade(self) -> None:
        """Let what was observed so far count for one observation: it decides only what those from now on do not tell
        apart.
        """
        if self.num_observations < 2:
            return
        share = 1.0 / self._gram[0][0]
        self._gram = [[share * entry for entry in row] for row in self._gram]
        self._moment = [share * entry for entry in self._moment]
        self.num_observations = 1
        self._num_outliers = 0
        self._coefficients = None

    def predict(self, features: Sequence[float]) -> float:
        """The expected value; 0 before any observation."""
        return float(sum(map(mul, self.coefficients, features)))

    @property
    def coefficients(self) -> tuple[float, ...]:  # [F]
        """As fitted now."""
        if self._coefficients is None:
            self._coefficients = self._fit()
        return self._coefficients

    def _is_outlier(self, features: Sequence[float], value: float) -> bool:
        expected = self.predict(features) if self.num_observations >= _MIN_OBSERVATIONS else 0.0
        is_far = 0.0 < expected * _OUTLIER < value and self._num_outliers < _MAX_OUTLIERS_IN_A_ROW
        self._num_outliers = self._num_outliers + 1 if is_far else 0
        return is_far

    def _fit(self) -> tuple[float, ...]:
        if not self.num_observations:
            return (0.0,) * len(self._prior)
        free = list(range(len(self._prior)))
        while True:
            found = dict(zip(free, self._solve(free), strict=True))
            negative = [index for index in free[1:] if found[index] < 0.0]
            if not negative:
                return tuple(found.get(index, 0.0) for index in range(len(self._prior)))
            free = [index for index in free if index not in negative]

    def _solve(self, free: Sequence[int]) -> list[float]:
        """The coefficients of the features that are ``free``; the others are 0."""
        gram = [[self._gram[i][j] + (self._precision[i] if i == j else 0.0) for j in free] for i in free]
        moment = [self._moment[i] + self._precision[i] * self._prior[i] * self._scale for i in free]
        return _solve_positive(gram, moment)


def _solve_positive(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a positive definite system, which needs no pivots; overwrites both."""
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
            right[row] -= factor * right[pivot]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (right[row] - known) / matrix[row][row]
    return found
