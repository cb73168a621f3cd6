"""Mode of a target's sessions, plain or speculative, and what a switch costs.

A switch costs time: drafts take in the text that they lack, and a target computes ahead only after a few plain steps.
The mode changes once the time lost in it, compared with the other, exceeds the price of the switch (ski rental: at most
twice the loss of a controller that knows the future).
"""

from __future__ import annotations

import enum

SWITCH_ROUNDS = 6.0
"""Price of a switch in plain rounds, without any text."""


class Mode(enum.StrEnum):
    """Decoding mode of a target's sessions."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"

    @property
    def other(self) -> Mode:
        """The other of the two."""
        return Mode.PLAIN if self is Mode.SPECULATIVE else Mode.SPECULATIVE


class ModeSwitch:
    """The current mode, and the time lost in it compared with the other."""

    def __init__(self) -> None:
        self.mode = Mode.PLAIN
        self.num_switches = 0
        self._lost_s = 0.0
        self._observed_s: float | None = None

    def is_worth(self, gain: float, text_s: float, plain_s: float, left_s: float) -> bool:
        """True if the other mode's gain over ``left_s`` seconds, an estimate, pays for a switch now."""
        return gain > 0.0 and left_s * (1.0 - 1.0 / (1.0 + gain)) > text_s + SWITCH_ROUNDS * plain_s

    def observe(self, now: float, gain: float, text_s: float, plain_s: float) -> bool:
        """True if the time lost so far pays for a switch. ``gain``: of the other mode's rate over the current one's;
        ``text_s``: seconds of the text that drafts lack; ``plain_s``: of a plain round.
        """
        interval_s = 0.0 if self._observed_s is None else now - self._observed_s
        self._observed_s = now
        self._lost_s = max(0.0, self._lost_s + interval_s * gain)
        return gain > 0.0 and self._lost_s > text_s + SWITCH_ROUNDS * plain_s

    def take(self, mode: Mode) -> bool:
        """Set the mode; returns whether it changes."""
        if mode is self.mode:
            return False
        self.mode, self._lost_s = mode, 0.0
        self.num_switches += 1
        return True

    def pause(self, now: float) -> None:
        """Time until ``now`` does not count: prompts are computed, and no mode is in effect."""
        self._observed_s = now
