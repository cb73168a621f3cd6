"""Session spread: how much sessions' acceptances truly differ, told from how much they seem to.

Judged tokens scatter around a session's acceptance, so that even equal sessions seem to differ. What they differ by
beyond that is the variance between them (the method of moments of a beta-binomial distribution). The less they differ,
the more judged tokens the overall mean counts for in what is believed of one (empirical Bayes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from outrider_coordinator.speculation.estimates.acceptance_estimate import SESSION_TOKENS, SessionAcceptance

_NUM_ENDED = 32
"""Ended sessions that are kept."""
_PRIOR_TOKENS = 100.0
"""Judged tokens for which it counts that sessions usually differ so much that ``SESSION_TOKENS`` are right."""
_FEWEST, _MOST = 4.0, 4096.0
"""Bounds of what the mean counts for."""


class SessionSpread:
    """What the overall acceptance counts for in a session's own, from sessions that run and those that ended lately."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=_NUM_ENDED)

    def note_ended(self, session: SessionAcceptance) -> None:
        """A session has ended."""
        if session.num_judged:
            self._ended.append((session.num_judged, session.surplus))

    def mean_tokens(self, running: Iterable[SessionAcceptance], mean: float) -> float:
        """Judged tokens that the overall ``mean`` counts for in the acceptance of one session."""
        pairs = [*self._ended, *((each.num_judged, each.surplus) for each in running if each.num_judged)]
        if len(pairs) < 2:
            return SESSION_TOKENS
        judged, surplus = np.array(pairs).T  # [N]
        beside = surplus - judged * (surplus.sum() / judged.sum())  # the mean may lag behind all of them
        variance = mean * (1.0 - mean)  # of one judged token
        free = len(pairs) - 1
        weight = float(judged.sum() - (judged**2).sum() / judged.sum()) - free
        excess = float((beside**2 / judged).sum()) - free * variance
        usual = variance / (SESSION_TOKENS + 1.0)
        between = (excess + _PRIOR_TOKENS * usual) / (max(weight, 0.0) + _PRIOR_TOKENS)
        return min(max(variance / max(between, 1e-9) - 1.0, _FEWEST), _MOST)
