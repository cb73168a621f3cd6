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
_LONGEST_REQUEST_S = 0.5
"""Time that requests take at most, usually: with longer ones a comparison takes too long."""
_NUM_REQUESTS = 8
"""Times of a request for which a mode is in effect to be compared ..."""
_SHORTEST_S = 0.5
"""... and its shortest time."""
_PAUSE = 32.0
"""Pause until the next comparison, in such times; it doubles each time that the same mode is better, up to ..."""
_LONGEST_PAUSE = 512.0
_HORIZON_S = 1.0
"""Of the usual number of sessions, which is fewer for a moment where requests end together."""
_SAME_LOAD = 2.0
"""So many times more or fewer sessions are another load."""


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
        self._better: Mode | None = None
        """By the last comparison."""
        self.rates: dict[Mode, float] = {}
        """Tokens a second of a session, by the last comparison of such a load; empty before it."""
        self._pause = _PAUSE
        self._is_pausing = False
        self._counts_from = self._ends_at = 0.0
        """Of the period under way; requests that began before it have ended when it begins to count."""
        self._noted_at = self._num_sessions = self._num_compared = 0.0
        """``_num_sessions``: lately, on average; ``_num_compared``: as many as when the comparison began."""

    @property
    def is_active(self) -> bool:
        """Whether the mode is chosen here."""
        return self._served is not None

    def note_time(self, now: float, mode: Mode, num_sessions: int) -> None:
        """So many sessions were served until now, those whose prompts wait or are computed included."""
        seconds, self._noted_at = now - self._noted_at, now
        weight = -math.expm1(-seconds / _HORIZON_S) if self._num_sessions else 1.0
        self._num_sessions += weight * (num_sessions - self._num_sessions)
        if (served := self._counted(now, mode)) is not None:
            served.session_s += num_sessions * seconds

    def note_tokens(self, now: float, mode: Mode, num_tokens: int) -> None:
        """They got so many tokens now."""
        if (served := self._counted(now, mode)) is not None:
            served.num_tokens += num_tokens

    def _counted(self, now: float, mode: Mode) -> _Served | None:
        if self._served is None or self._is_pausing or now < self._counts_from:
            return None
        return self._served.setdefault(mode, _Served())

    def choose(self, now: float, mode: Mode, *, drafting_share: float, request_s: float, may_draft: bool) -> Mode:
        """The mode from now on, ``mode`` itself where nothing is to be compared.

        ``drafting_share``: of the time, when sessions may draft; ``request_s``: time that a request usually takes;
        ``may_draft``: whether any session's request allows drafts.
        """
        most_share = _BEGINS_BELOW if self._served is None else _ENDS_ABOVE
        if request_s > _LONGEST_REQUEST_S or not may_draft or drafting_share > most_share:
            self._leave()
            return mode
        if self._served is None or self._has_load_changed:
            self._leave()
            if mode is Mode.SPECULATIVE:  # plain decoding is left as it is: what is to be avoided is to be slower
                self._served, self._better, self._pause = {}, None, _PAUSE
                self._num_compared = self._num_sessions
                self._begin(now, request_s)
            return mode
        if now < self._ends_at:
            return mode
        if self._is_pausing:
            self._served.clear()
            self._begin(now, request_s)
            return mode
        if mode.other not in self._served:
            self._begin(now, request_s)
            return mode.other
        return self._end(self._served, now, request_s)

    @property
    def _has_load_changed(self) -> bool:
        return not 1.0 / _SAME_LOAD <= self._num_sessions / max(self._num_compared, 1.0) <= _SAME_LOAD

    def _leave(self) -> None:
        """The mode is not chosen here any more."""
        self._served, self.rates = None, {}

    def _begin(self, now: float, request_s: float) -> None:
        """Begin to count what a mode gives."""
        self._is_pausing = False
        self._counts_from = now + request_s
        self._ends_at = self._counts_from + max(_NUM_REQUESTS * request_s, _SHORTEST_S)

    def _end(self, served: dict[Mode, _Served], now: float, request_s: float) -> Mode:
        """Both modes were in effect: the better one goes on."""
        self.rates = {mode: served[mode].rate for mode in Mode}
        better = max(Mode, key=self.rates.__getitem__)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if better is self._better else _PAUSE
        self._better, self._is_pausing = better, True
        self._ends_at = now + self._pause * max(_NUM_REQUESTS * request_s, _SHORTEST_S)
        return better
