"""Draft timeout: how long a step waits for one draft, derived from the draft's response times; 0 while it does not
respond.

Independent of sessions and timers; times are seconds of any monotonic clock.
"""

from __future__ import annotations

MARGIN = 8.0
"""A draft is late after so many times its slowest recent answer ..."""
FLOOR = 0.5
"""... but not before this share of the longest wait: a busy machine is slow now and then."""
DECAY = 0.99
"""Of the slowest answer's time, with each answer."""


class DraftTimeout:
    """The timeout of one draft's proposals."""

    def __init__(self, longest_s: float) -> None:
        """``longest_s``: the longest wait, which counts until the draft has answered once."""
        self._longest_s = longest_s
        self._slowest_s: float | None = None
        self._heard_at: float | None = None
        self.is_silent = False
        """A step waited in vain, and the draft has answered no step since."""

    @property
    def seconds(self) -> float:
        """Maximum wait of a step that begins to wait now, in seconds."""
        if self.is_silent:
            return 0.0
        if self._slowest_s is None:
            return self._longest_s
        return min(max(MARGIN * self._slowest_s, FLOOR * self._longest_s), self._longest_s)

    def heard(self, now: float) -> None:
        """Record a response of the draft."""
        self._heard_at = now
        self.is_silent = False

    def note_wait(self, seconds: float) -> None:
        """Record the duration of a response, in time or late."""
        self._slowest_s = max(seconds, DECAY * (self._slowest_s or 0.0))

    def passed(self, began: float) -> None:
        """Record a wait since ``began`` without a response: if there was none at all since, the draft is silent."""
        if self._heard_at is None or self._heard_at < began:
            self.is_silent = True
