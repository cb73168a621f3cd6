"""Order of draft and target: in turn or ahead, whichever has served a target's sessions sooner. From times alone.

Each order is measured by the time that a session takes per token, for each power of two of sessions. The order that is
not in use is tried again now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider_coordinator.speculation.step_costs import bucket_of

TOKENS_OF_WINDOW = 64
"""Tokens of each session in a window, some .2 s; one session needs as many again, since acceptance varies."""
_TOKENS_OF_SHORT_WINDOW = 24
"""The same after a change of load or order, which is not measured, and in a trial."""
_SWITCH_RATIO = 0.97
"""Time per token ahead over that in turn from which on a change pays: windows vary by some 2%. It is kept up to 1."""
FIRST_TRIAL_S, _PAUSE_S = 1.0, 64.0
"""Service before the first trial, or one after a change, and before one after a trial that changed nothing."""
_MAX_DISTURBED = 3
"""Windows in a row that are not measured, since sessions came or went: their prompts take a part of the time."""


@dataclass(slots=True)
class _Load:
    """Measurements of one power of two of sessions."""

    in_turn_s: float = 0.0
    """Time of a session per token; 0: not known."""
    ahead_s: float = 0.0
    is_ahead: bool = False
    """Order that was chosen last."""
    pause_s: float = field(default_factory=lambda: FIRST_TRIAL_S)
    """Service until the next trial."""
    served_s: float = 0.0
    """Service since the last trial."""

    def choose(self) -> bool:
        """Choose the order; True: ahead."""
        limit_s = self.in_turn_s if self.is_ahead else _SWITCH_RATIO * self.in_turn_s
        self.is_ahead = 0.0 < self.ahead_s < limit_s
        return self.is_ahead

    def note(self, seconds: float, *, is_ahead: bool) -> None:
        if is_ahead:
            self.ahead_s = seconds
        else:
            self.in_turn_s = seconds


class Order:
    """Choice of the order on one target."""

    def __init__(self, apply: Callable[[bool], None], clock: Callable[[], float] = time.monotonic) -> None:
        """``apply`` puts an order into effect; True: ahead."""
        self.is_ahead = False
        self._apply, self._clock = apply, clock
        self._num_sessions = self._num_tokens = 0
        self._loads: dict[int, _Load] = {}
        self._is_trial = False
        self._measured: _Load | None = None
        """Load that the window measures: that of its start; None after a change of the order."""
        self._is_disturbed, self._num_disturbed = False, 0
        self._session_s = self._window_s = 0.0
        self._since = clock()

    def enter(self) -> None:
        """A session begins."""
        self._change(1)

    def leave(self) -> None:
        """A session ends."""
        self._change(-1)

    def note(self, num_tokens: int) -> None:
        """A session has got tokens."""
        self._num_tokens += num_tokens
        if self._num_tokens >= self._tokens_of_window():
            self._end_window()

    def _change(self, num: int) -> None:
        self._advance()
        self._num_sessions += num
        self._is_disturbed = True

    @property
    def _load(self) -> _Load:
        return self._loads.setdefault(bucket_of(max(1, self._num_sessions)), _Load())

    def _tokens_of_window(self) -> int:
        """Tokens of all sessions after which the window ends."""
        if self._is_trial or self._measured is not self._load:
            return _TOKENS_OF_SHORT_WINDOW * self._num_sessions
        return TOKENS_OF_WINDOW * (self._num_sessions + (self._num_sessions == 1))

    def _advance(self) -> None:
        now = self._clock()
        if self._num_sessions:
            self._session_s += (now - self._since) * self._num_sessions
            self._window_s += now - self._since
        self._since = now

    def _end_window(self) -> None:
        self._advance()
        load, window_s = self._load, self._window_s
        self._num_disturbed = self._num_disturbed + 1 if self._is_disturbed else 0
        is_measured = self._measured is load and self._num_disturbed in (0, _MAX_DISTURBED + 1)
        self._num_disturbed %= _MAX_DISTURBED + 1
        seconds = self._session_s / self._num_tokens
        self._begin_window()
        load.served_s += window_s
        if not is_measured and not self._is_trial:  # the number of sessions has changed, or the order
            self._take(load.choose())
        if not is_measured:
            return
        load.note(seconds, is_ahead=self.is_ahead)
        if self._is_trial:
            self._end_trial(load)
        elif load.served_s >= load.pause_s:
            self._is_trial = True
            self._take(not self.is_ahead)
        else:
            self._take(load.choose())

    def _end_trial(self, load: _Load) -> None:
        self._is_trial, load.served_s = False, 0.0
        is_ahead = load.choose()
        load.pause_s = FIRST_TRIAL_S if is_ahead == self.is_ahead else _PAUSE_S
        self._take(is_ahead)

    def _begin_window(self) -> None:
        self._session_s = self._window_s = 0.0
        self._num_tokens, self._measured, self._is_disturbed = 0, self._load, False

    def _take(self, is_ahead: bool) -> None:
        """Put an order into effect; the window after a change of it is not measured."""
        if is_ahead != self.is_ahead:
            self.is_ahead = is_ahead
            self._begin_window()
            self._measured = None
            self._apply(is_ahead)
