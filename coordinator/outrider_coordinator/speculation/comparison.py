"""Comparison of both modes of a target's sessions, and the switch between them.

A switch costs time: drafts take in the text that they lack, and a target computes ahead only after a few plain steps.
The mode changes once the time lost in it, compared with the other, exceeds the price of the switch (ski rental: at most
twice the loss of a controller that knows the future).
"""

from __future__ import annotations

from outrider_coordinator.speculation.expectation import Expectation
from outrider_coordinator.speculation.sessions import Mode, Population

SWITCH_ROUNDS = 6.0
"""Price of a switch in plain rounds, without any text."""
_APART_RATIO = 0.85
"""Factor to the rate of the mode that other coordinators' sessions are not in: they wait for each other."""


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


class Comparison:
    """Decides whether the mode of one target's sessions is to change."""

    def __init__(self, population: Population, expectation: Expectation, switch: ModeSwitch) -> None:
        self._population, self._expected, self._switch = population, expectation, switch
        self.speculated_s = 0.0
        """Seconds of service when speculation was last timed."""

    @property
    def _is_speculating(self) -> bool:
        return self._switch.mode is Mode.SPECULATIVE

    def is_to_switch(self, now: float, *, is_fresh: bool) -> bool:
        """Compare the modes; ``is_fresh``: all prompts have ended since the last choice, most sessions are new."""
        expected, mode, drafting = self._expected, self._switch.mode, self._population.drafting
        plain_s, lacked_s = expected.plain_round_s, self.text_seconds(self._population.lag)
        is_untouched = is_fresh and not any(session.has_ever_drafted for session in drafting)
        left_s = expected.left_s(drafting, now, is_speculating=self._is_speculating)
        rates = self._rates(now)
        if is_untouched:  # going on with speculation has the price of the text too
            rates[Mode.SPECULATIVE] /= 1.0 + lacked_s / max(left_s, plain_s)
            return rates[mode.other] > rates[mode]
        gain = rates[mode.other] / rates[mode] - 1.0
        text_s = 0.0 if self._is_speculating else lacked_s
        if self._switch.observe(now, gain, text_s, plain_s):
            return self._is_speculating or left_s * gain > text_s
        return self._switch.is_worth(gain, text_s, plain_s, left_s)

    def _rates(self, now: float) -> dict[Mode, float]:
        """Expected rates of both modes beside what other coordinators do; optimistic where little was measured."""
        expected = self._expected
        plain_for_s = 0.0 if self._is_speculating else now - self.speculated_s
        speculative = expected.optimistic_rate(len(self._population), plain_for_s)
        rates = expected.rates | {Mode.SPECULATIVE: speculative}
        if expected.mode_apart is not None:
            rates[expected.mode_apart] *= _APART_RATIO
        return rates

    def text_seconds(self, num_tokens: float) -> float:
        """Time in which drafts compute ``num_tokens`` of text."""
        return self._expected.text_seconds(num_tokens, reads_states=self._population.reads_states)
