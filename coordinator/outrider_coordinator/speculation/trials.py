"""Trials of the mode that is not in effect: all sessions speculate, or decode plainly, for a few rounds.

Estimates of a mode that is not in effect grow old, or were never measured with about so many sessions. A trial of plain
decoding is cheap, since drafts lack no more afterwards than a step can bring. A trial of speculation brings all drafts
their text, so it is made only where speculation may well be better.
"""

from __future__ import annotations

from outrider_coordinator.speculation.exploration import Excursion, ExplorationBudget
from outrider_coordinator.speculation.mode_selector import Mode
from outrider_coordinator.speculation.round_timer import ROUNDS_NOT_AHEAD

_PLAIN_ROUNDS = ROUNDS_NOT_AHEAD + 4
_SPECULATIVE_ROUNDS = 5
_LONGEST_S = 3.0
_HOPE_OF_PLAIN = {False: 1.3, True: 1.1}
"""So many times faster than expected plain decoding may turn out: unknown with about so many sessions, and known."""
_HOPE_OF_SPECULATION, _STEADY_S = 1.1, 30.0
"""The same for speculation, once there have been about so many sessions for so long. Before that it has to be expected
to be better, and is then switched to: with more sessions than before it is rather overestimated. With fewer than before
it is rather underestimated, so that the first trial need not wait.
"""
_SHORTEST_PAUSE_S = {Mode.PLAIN: 4.0, Mode.SPECULATIVE: 30.0}
_LONGEST_PAUSE_S = 60.0


class ModeTrial:
    """Trials of one mode, one after the other."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._num_rounds = _PLAIN_ROUNDS if mode is Mode.PLAIN else _SPECULATIVE_ROUNDS
        self._budget = ExplorationBudget(shortest_pause_s=_SHORTEST_PAUSE_S[mode], longest_pause_s=_LONGEST_PAUSE_S)
        self._excursion: Excursion | None = None
        self._tried: set[int] = set()
        """Magnitudes of the number of sessions for which it was tried."""

    @property
    def is_active(self) -> bool:
        """Whether a trial is under way."""
        return self._excursion is not None

    def begin_if_due(
        self,
        now: float,
        steady_s: float,
        num_sessions: int,
        rates: dict[Mode, float],
        *,
        is_known: bool,
        is_below_known: bool,
    ) -> bool:
        """Begin a trial, if it is worth its price; ``steady_s``: for how long there have been about so many sessions;
        ``is_known``: the mode was timed with about so many; ``is_below_known``: speculation was timed with more.
        """
        is_first = not is_known and num_sessions.bit_length() not in self._tried
        if self.mode is Mode.SPECULATIVE and steady_s < _STEADY_S and not (is_first and is_below_known):
            return False
        hope = _HOPE_OF_PLAIN[is_known] if self.mode is Mode.PLAIN else _HOPE_OF_SPECULATION
        if rates[self.mode] * hope < rates[self.mode.other]:
            return False
        if not is_first and not self._budget.is_due(now):
            return False
        self._tried.add(num_sessions.bit_length())
        self._excursion = Excursion(now)
        return True

    def note_round(self, now: float, num_tokens: int, share: float, usual_rate: float, *, counts: bool) -> bool:
        """A message of this share of the sessions; returns whether the trial is over now.

        ``counts``: it was of the kind that is tried. ``usual_rate``: tokens a second of the mode in effect.
        """
        excursion = self._excursion
        if excursion is None:
            return False
        excursion.note(num_tokens, share if counts else 0.0)
        if excursion.num_rounds < self._num_rounds - 0.5 and now - excursion.began < _LONGEST_S:
            return False
        self.end(now, usual_rate)
        return True

    def end(self, now: float, usual_rate: float = 0.0) -> None:
        """End the trial, if one is under way; ``usual_rate`` is as for ``note_round``."""
        if self._excursion is not None:
            self._budget.spend(now, self._excursion.price(now, usual_rate))
            self._excursion = None
