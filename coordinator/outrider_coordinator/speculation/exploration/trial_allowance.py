"""Allowance of trials: the seconds that trying speculation may cost, out of those served with about so many sessions.

What speculation takes with many more sessions than it was timed with is a guess, and trying it there brings every
draft its text first. So a trial has to be paid for beforehand: its expected loss is at most a share of the time that
was served under such a load, however short the runs are that this time is made of, and that new requests will take.
"""

from __future__ import annotations

_SHARE = 0.02
_MOST_S = 300.0
"""Seconds of service that count: an allowance unused for long is no licence for a trial of many seconds."""
_WASTE = 0.5
"""Share of a trial's speculative rounds that is lost if speculation turns out not to pay: the worst seen was 0.35."""
_GUESS = 2.0
"""Duration of a speculative round, in plain ones, before any was timed."""


def expected_loss_s(plain_s: float, speculative_s: float, *, num_rounds: int, switch_s: float) -> float:
    """Seconds that a trial of so many speculative rounds costs where speculation does not pay.

    ``plain_s`` and ``speculative_s``: a round of each mode; 0 for a speculative one that nothing is known of.
    ``switch_s``: the price of the switch, the drafts' text included.
    """
    return switch_s + num_rounds * _WASTE * (speculative_s or _GUESS * plain_s)


class TrialAllowance:
    """Seconds left for trials, by the magnitude of the number of sessions."""

    def __init__(self) -> None:
        self._left_s: dict[int, float] = {}
        self._saved_s: dict[int, float] = {}
        """Seconds that speculation would probably have saved since the last trial, by the same."""
        self._served_until = 0.0

    def serve(self, now: float, num_sessions: int, saved_share: float = 0.0) -> None:
        """So many sessions were served until ``now``, in seconds of service; ``saved_share``: of that time, what
        speculation would probably have saved.
        """
        served_s = max(now - self._served_until, 0.0)
        self._served_until = max(now, self._served_until)
        magnitude = num_sessions.bit_length()
        self._left_s[magnitude] = min(self.left_s(num_sessions) + _SHARE * served_s, _SHARE * _MOST_S)
        saved_s = self._saved_s.get(magnitude, 0.0) + saved_share * served_s
        self._saved_s[magnitude] = min(saved_s, _SHARE * _MOST_S)

    def left_s(self, num_sessions: int, *, ahead_s: float = 0.0, saved_share: float = 0.0) -> float:
        """Below 0 after a trial that cost more than expected. ``ahead_s``: time that the sessions will surely take."""
        left_s = self._left_s.get(num_sessions.bit_length(), 0.0) + _SHARE * min(ahead_s, _MOST_S)
        if ahead_s:
            left_s += self._saved_s.get(num_sessions.bit_length(), 0.0) + saved_share * min(ahead_s, _MOST_S)
        return left_s

    def spend(self, num_sessions: int, price_s: float) -> None:
        """A trial with so many sessions cost so many seconds."""
        self._left_s[num_sessions.bit_length()] = self.left_s(num_sessions) - price_s
        self._saved_s.pop(num_sessions.bit_length(), None)
