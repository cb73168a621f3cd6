"""Least squares that forgets: a linear model of a time, fitted to the observations made lately.

Owns the normal equations, the prior that stands in where observations say nothing, and what is left out as an outlier.
Knows no clock: the unit of memory is an observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import numpy as np

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
        self._prior, self._spread = np.array(prior), np.array(spread)
        self._keep = float(np.exp(-1.0 / memory))
        self._gram = np.zeros((len(prior), len(prior)))
        self._moment = np.zeros(len(prior))
        self._scale = 0.0
        self._num_outliers = 0
        self._coefficients: tuple[float, ...] | None = None
        self.num_observations = 0

    def note(self, features: Sequence[float], value: float) -> None:
        """One observation."""
        if self._is_outlier(features, value):
            return
        x = np.asarray(features, dtype=float)
        self._gram = self._keep * self._gram + np.outer(x, x)
        self._moment = self._keep * self._moment + value * x
        weight = max(1.0 - self._keep, 1.0 / (self.num_observations + 1))
        self._scale += weight * (abs(value) - self._scale)
        self.num_observations += 1
        self._coefficients = None

    def predict(self, features: Sequence[float]) -> float:
        """The expected value; 0 before any observation."""
        return float(sum(map(mul, self._fitted, features)))

    @property
    def coefficients(self) -> np.ndarray:  # [F]
        """As fitted now."""
        return np.array(self._fitted)

    @property
    def _fitted(self) -> tuple[float, ...]:
        if self._coefficients is None:
            self._coefficients = tuple(self._solve().tolist())
        return self._coefficients

    def _is_outlier(self, features: Sequence[float], value: float) -> bool:
        expected = self.predict(features) if self.num_observations >= _MIN_OBSERVATIONS else 0.0
        is_far = 0.0 < expected * _OUTLIER < value and self._num_outliers < _MAX_OUTLIERS_IN_A_ROW
        self._num_outliers = self._num_outliers + 1 if is_far else 0
        return is_far

    def _solve(self) -> np.ndarray:
        if not self.num_observations:
            return np.zeros(len(self._prior))
        precision = (_NOISE / self._spread) ** 2
        free = np.ones(len(self._prior), dtype=bool)
        while True:
            found = np.zeros(len(self._prior))
            gram = self._gram[np.ix_(free, free)] + np.diag(precision[free])
            moment = self._moment[free] + precision[free] * self._prior[free] * self._scale
            found[free] = np.linalg.solve(gram, moment)
            negative = (found < 0.0) & free
            negative[0] = False
            if not negative.any():
                return found
            free &= ~negative
