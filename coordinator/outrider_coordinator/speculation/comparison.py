"""Comparison of both modes of a target's sessions, and the switch between them.

A switch costs time: drafts take in the text that they lack, and a target computes ahead only after a few plain steps.
The mode changes once the gain over the time left pays for that.
"""

from __future__ import annotations

from outrider_coordinator.speculation.expectation import Expectation
from outrider_coordinator.speculation.sessions import Mode, Population

SWITCH_ROUNDS = 6.0
"""Price of a switch in plain rounds, without any text."""
_APART_RATIO = 0.85
"""Factor to the rate of the mode that other coordinators' sessions are not in: they wait for each other."""


class Comparison:
    """The mode of one target's sessions, and whether it is to change."""

    def __init__(self, population: Population, expectation: Expectation) -> None:
        self._population, self._expected = population, expectation
        self.mode = Mode.PLAIN
        self.num_switches = 0
        """Changes of the mode."""
        self.speculated_s = 0.0
        """Seconds of service when speculation was last timed."""
        self._began_s = 0.0
        """Seconds of service when the mode began."""

    def take(self, mode: Mode, now: float) -> bool:
        """Set the mode, ``now`` in seconds of service; returns whether it changes."""
        if mode is self.mode:
            return False
        self.mode, self._began_s = mode, now
        self.num_switches += 1
        return True

    @property
    def _is_speculating(self) -> bool:
        return self.mode is Mode.SPECULATIVE

    def is_to_switch(self, now: float, *, is_fresh: bool) -> bool:
        """Compare the modes; ``is_fresh``: all prompts have ended since the last choice."""
        expected, mode = self._expected, self.mode
        plain_s, lacked_s = expected.plain_round_s, expected.text_seconds(self._population.num_uncomputed)
        is_untouched = is_fresh and not self._population.has_ever_drafted
        left_s = expected.left_s(now, is_speculating=self._is_speculating)
        rates = self._rates(now)
        if is_untouched:  # going on with speculation has the price of the text too
            rates[Mode.SPECULATIVE] /= 1.0 + lacked_s / max(left_s, plain_s)
            return rates[mode.other] > rates[mode]
        gain = rates[mode.other] / rates[mode] - 1.0
        text_s = 0.0 if self._is_speculating else lacked_s
        return gain > 0.0 and left_s * (1.0 - 1.0 / (1.0 + gain)) > text_s + SWITCH_ROUNDS * plain_s

    def _rates(self, now: float) -> dict[Mode, float]:
        """Expected rates of both modes beside what other coordinators do; optimistic where little was measured."""
        expected = self._expected
        # The bonus that began speculation stays until a round of it was timed, and does not grow.
        until_s = self._began_s if self._is_speculating else now
        speculative = expected.optimistic_rate(until_s - self.speculated_s)
        rates = expected.rates | {Mode.SPECULATIVE: speculative}
        if expected.mode_apart is not None:
            rates[expected.mode_apart] *= _APART_RATIO
        return rates
