"""Draft lengths while decoding is speculative: the best ones, kept steady, and varied now and then to know prices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider_coordinator.speculation.draft_length import Choice, choice_of, longest_of
from outrider_coordinator.speculation.estimates.step_times import StepTimes
from outrider_coordinator.speculation.session_state import ControlledSession

START_LENGTHS = (4, 4, 2, 2, 4, 1, 3, 5, 2, 4, 1, 3)
"""Draft lengths of the first speculative rounds: they differ, so that prices can be told apart."""
_MIN_GAIN = 1.02
"""Least ratio of rates for which another longest length is taken."""
_ROUNDS_BETWEEN_VARIATIONS = 32
_VARIATIONS = (-1, 1, -2, 2)


class LengthPlanner:
    """The longest draft length of one target's sessions."""

    def __init__(self, max_length: int) -> None:
        self.base_length = min(START_LENGTHS[0], max_length)
        """Longest draft length, variations left out."""
        self._num_rounds = self._num_variations = 0
        self._next_variation = _ROUNDS_BETWEEN_VARIATIONS

    @property
    def is_starting(self) -> bool:
        """Whether prices of draft lengths have not been told apart yet."""
        return self._num_rounds < len(START_LENGTHS)

    def note_round(self) -> None:
        """A speculative round was timed."""
        self._num_rounds += 1

    def set_lengths(
        self,
        sessions: Sequence[ControlledSession],
        useful: np.ndarray,
        best: Choice,
        times: StepTimes,
        share: float,
        *,
        is_trial: bool = False,
    ) -> None:
        """Set every session's length for the next steps; ``useful`` [B, K] is as ``usefulness`` gives it. In a trial
        all draft: what is expected of times, by which few might, is what it is to correct.
        """
        if self.is_starting:
            for session in sessions:
                session.length = min(START_LENGTHS[self._num_rounds], session.limit)
            return
        longest = longest_of(useful)
        current = choice_of(useful, min(self.base_length, longest), times, share)
        chosen = best if best.rate > _MIN_GAIN * current.rate else current
        self.base_length = chosen.draft_length
        is_varied = self._num_rounds >= self._next_variation
        take(sessions, self._variation(useful, longest, times, share) if is_varied else chosen)
        if is_varied or is_trial:  # the acceptance of those that would draft nothing stays known too
            for session in sessions:
                session.length = max(session.length, min(1, session.limit))

    def _variation(self, useful: np.ndarray, longest: int, times: StepTimes, share: float) -> Choice:
        self._next_variation = self._num_rounds + _ROUNDS_BETWEEN_VARIATIONS
        length = self.base_length + _VARIATIONS[self._num_variations % len(_VARIATIONS)]
        self._num_variations += 1
        return choice_of(useful, min(max(length, 1), longest), times, share)


def take(sessions: Sequence[ControlledSession], choice: Choice) -> None:
    """Give the sessions the lengths of a choice."""
    for session, length in zip(sessions, choice.lengths, strict=True):
        session.length = length
