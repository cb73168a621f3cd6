"""Comparison of both modes by the tokens that users get, for short requests that come all the time.

There hardly any round is without a prompt or a draft's text, so rounds say little of what a mode gives. Requests end
soon, though: each mode is in effect for the time of some of them, and the one that gave more tokens goes on, until it
is compared again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider_coordinator.speculation.mode_selector import Mode

_BEGINS_BELOW, _ENDS_ABOVE = 0.75, 0.9
"""Share of the time in which sessions may draft, below which a comparison begins, and above which it ends."""
_MOST_TOKENS = 64.0
"""Tokens that requests get at most, usually: those with more have rounds enough that say something."""
_NUM_TIMES, _NUM_REQUESTS = 8, 64
"""Each mode is in effect for so many times what a request takes, and for so many requests, since acceptance differs ...
"""
_SHORTEST_S, _LONGEST_S = 0.5, 8.0
"""... within these bounds. The second one ends after the times alone where it differs clearly from the first one."""
_CLEAR = 1.15
_PAUSE = 32.0
"""Pause until the next comparison, in such times; it doubles each time that the same mode is better, up to ..."""
_LONGEST_PAUSE_S = 300.0
_LEAST_GAIN = 1.01
"""Of plain decoding over speculation: less may be chance, and the choice by rounds does not soon come back from it."""
_HORIZON_S = 1.0
"""Of the usual number of sessions, which is fewer for a moment where requests end together."""
_SAME_LOAD, _STEADY_LOAD = 2.0, 1.3
"""So many times more or fewer sessions are another load, and are not steady."""


@dataclass(slots=True)
class _Served:
    """What was served while a mode was in effect."""

    num_tokens: int = 0
    session_s: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second of a session."""
        return self.num_tokens / self.session_s if self.session_s else 0.0


class ModeComparison:
    """Comparisons of one target's sessions. All times are seconds of service."""

    def __init__(self) -> None:
        self._served: dict[Mode, _Served] | None = None
        """In the comparison under way, or before the pause; None where the mode is not chosen here."""
        self._mode = Mode.SPECULATIVE
        """By the last comparison, or before the first one."""
        self.is_pausing = False
        """A comparison has ended, and its mode goes on."""
        self.rates: dict[Mode, float] = {}
        """Tokens a second of a session, by the last comparison of such a load; empty before it."""
        self.num_changes = 0
        """Comparisons by which another mode went on than before."""
        self._pause_s = 0.0
        self._counts_from = self._ends_at = 0.0
        """Of the period under way; requests that began before it have ended when it begins to count."""
        self._noted_at = self._num_now = self._num_sessions = self._num_compared = 0.0
        """Sessions now, lately on average, and on average when the comparison began."""

    @property
    def is_active(self) -> bool:
        """Whether the mode is chosen here."""
        return self._served is not None

    def note_time(self, now: float, mode: Mode, num_sessions: int) -> None:
        """So many sessions were served until now, those whose prompts wait or are computed included."""
        seconds, self._noted_at, self._num_now = now - self._noted_at, now, num_sessions
        weight = -math.expm1(-seconds / _HORIZON_S) if self._num_sessions else 1.0
        self._num_sessions += weight * (num_sessions - self._num_sessions)
        if (served := self._counted(now, mode)) is not None:
            served.session_s += num_sessions * seconds

    def note_tokens(self, now: float, mode: Mode, num_tokens: int) -> None:
        """They got so many tokens now."""
        if (served := self._counted(now, mode)) is not None:
            served.num_tokens += num_tokens

    def _counted(self, now: float, mode: Mode) -> _Served | None:
        if self._served is None or self.is_pausing or now < self._counts_from:
            return None
        return self._served.setdefault(mode, _Served())

    def choose(
        self,
        now: float,
        mode: Mode,
        *,
        drafting_share: float,
        request_s: float,
        request_tokens: float,
        worth: dict[Mode, float],
    ) -> Mode:
        """The mode from now on, ``mode`` itself where nothing is to be compared.

        ``drafting_share``: of the time, when sessions may draft; ``request_s`` and ``request_tokens``: time that a
        request usually takes, and the tokens that it gets; ``worth``: factors to the rates, below 1 for a mode that
        most foreign sessions are not in.
        """
        most_share = _ENDS_ABOVE if self.is_active else _BEGINS_BELOW
        if request_tokens > _MOST_TOKENS or drafting_share > most_share:
            return self._leave(mode)
        if self._served is None:
            if mode is Mode.SPECULATIVE and self._is_load(self._num_now, _STEADY_LOAD):
                self._start(now, mode, request_s)
            return mode
        if not self._is_load(self._num_compared, _SAME_LOAD):
            self._start(now, self._mode, request_s)
            return mode
        if now < self._ends_at and not self._is_clear(now, mode, request_s):
            return mode
        if self.is_pausing:
            self._served.clear()
        elif mode.other in self._served:
            return self._end(self._served, now, request_s, worth)
        else:
            mode = mode.other
        self._begin(now, request_s)
        return mode

    def _is_load(self, num_sessions: float, most: float) -> bool:
        """Whether there are about so many sessions lately."""
        return 1.0 / most <= self._num_sessions / max(num_sessions, 1.0) <= most

    def _is_clear(self, now: float, mode: Mode, request_s: float) -> bool:
        """Whether what was counted of the mode in effect is enough beside what was counted of the other one."""
        if self.is_pausing or now < self._counts_from + max(_NUM_TIMES * request_s, _SHORTEST_S):
            return False
        served = self._served or {}
        if len(served) < len(Mode) or not served[mode.other].rate:
            return False
        return not 1.0 / _CLEAR < served[mode].rate / served[mode.other].rate < _CLEAR

    def _start(self, now: float, mode: Mode, request_s: float) -> None:
        """Compare anew; ``mode`` goes on if nothing comes of it."""
        self._served, self._mode, self.rates, self._pause_s = {}, mode, {}, 0.0
        self._num_compared = self._num_sessions
        self._begin(now, request_s)

    def _leave(self, mode: Mode) -> Mode:
        """The mode is not chosen here any more. One that was in effect to be compared ends with that."""
        if self.is_active and not self.is_pausing:
            mode = self._mode
        self._served, self.rates = None, {}
        return mode

    def _period_s(self, request_s: float) -> float:
        num_times = max(_NUM_TIMES, _NUM_REQUESTS / max(self._num_sessions, 1.0))
        return min(max(num_times * request_s, _SHORTEST_S), _LONGEST_S)

    def _begin(self, now: float, request_s: float) -> None:
        """Begin to count what a mode gives."""
        self.is_pausing = False
        self._counts_from = now + request_s
        self._ends_at = self._counts_from + self._period_s(request_s)

    def _end(self, served: dict[Mode, _Served], now: float, request_s: float, worth: dict[Mode, float]) -> Mode:
        """Both modes were in effect: the better one goes on."""
        self.rates = {mode: served[mode].rate for mode in Mode}
        plain, speculative = (worth[mode] * self.rates[mode] for mode in (Mode.PLAIN, Mode.SPECULATIVE))
        better = Mode.PLAIN if plain > _LEAST_GAIN * speculative else Mode.SPECULATIVE
        shortest_s = _PAUSE * self._period_s(request_s)
        self._pause_s = min(2.0 * self._pause_s if better is self._mode else 0.0, _LONGEST_PAUSE_S) or shortest_s
        self.num_changes += better is not self._mode
        self._mode, self.is_pausing = better, True
        self._ends_at = now + self._pause_s
        return better
