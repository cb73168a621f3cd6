"""Goodput: expected tokens per expected second of both modes, and the draft length that gives the most.

With acceptance ``a_1, a_2, ...`` by position, the k-th draft token is accepted with probability ``a_1 ... a_k``. All
sessions of a target draft equally many tokens, each up to its own limit.

Shape letters: ``B`` sessions, ``K`` draft lengths from 1 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider_coordinator.speculation.acceptance import PRIOR_TOKENS, Acceptance
from outrider_coordinator.speculation.rounds import RoundLearner
from outrider_coordinator.speculation.sessions import Mode, Population
from outrider_coordinator.speculation.step_costs import Average, StepCosts

_RENEWAL_S = 30.0
"""Seconds without a timed round of speculation after which the optimism bonus is whole again."""
_MAX_OPTIMISM = 0.15
"""Share by which speculation may be faster than expected where it was hardly measured with as many sessions."""
_NUM_ROUNDS_WITHOUT_OPTIMISM = 24
"""Speculative rounds after which there is no optimism bonus."""
_TAIL_A_DOUBLING = 0.016
"""Share by which rounds of speculation count longer for each doubling of the sessions: these end at different times."""
_DEFAULT_REQUEST_S = 1.0
"""Seconds that a request is assumed to take before any has ended."""

RoundSeconds = Callable[[np.ndarray], np.ndarray]
"""Seconds of a round with each draft length, [K], by the draft tokens of a session in the mean, [K]."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft length, and what is expected of a round."""

    length: int
    tokens: float
    """Tokens of all sessions together."""
    seconds: float


def best_choice(by_position: np.ndarray, limits: Sequence[int], seconds: RoundSeconds) -> Choice | None:
    """The draft length with the highest rate, other than 0; None where no session may draft.

    ``by_position``: acceptance, [K]; ``limits``: the largest draft length of each session, [B].
    """
    longest = min(max(limits, default=0), len(by_position))
    if not longest:
        return None
    useful = np.cumprod(by_position[:longest])
    num_drafting = (np.array(limits)[:, None] > np.arange(longest)).sum(axis=0)  # at each position
    tokens = len(limits) + np.cumsum(useful * num_drafting)
    times = seconds(np.cumsum(num_drafting) / len(limits))
    best = int(np.argmax(tokens / times))
    return Choice(best + 1, float(tokens[best]), float(times[best]))


class Expectation:
    """Rates that are expected of the sessions of one target."""

    def __init__(self, population: Population, costs: StepCosts, acceptance: Acceptance, rounds: RoundLearner) -> None:
        self.rounds: dict[Mode, tuple[float, float]] = dict.fromkeys(Mode, (0.0, 0.0))
        """Tokens and seconds of a round of each mode at the last choice."""
        self.length = 0
        """Draft length of that speculation."""
        self.request_s = Average()
        """Seconds that requests take."""
        self._population, self._costs, self._acceptance, self._learner = population, costs, acceptance, rounds

    @property
    def rates(self) -> dict[Mode, float]:
        """Tokens per second of each mode at the last choice."""
        return {mode: tokens / seconds if seconds else 0.0 for mode, (tokens, seconds) in self.rounds.items()}

    @property
    def plain_round_s(self) -> float:
        """Seconds of a plain round."""
        return self.rounds[Mode.PLAIN][1]

    @property
    def num_rows(self) -> int:
        """Sessions in a forward, those of other coordinators included."""
        return len(self._population) + round(self._learner.other_rows.value)

    def estimate(self) -> bool:
        """Estimate both modes, speculation with its best length; False where no session may draft."""
        rows, context = self.num_rows, self._population.context
        self.rounds[Mode.PLAIN] = len(self._population), self._costs.plain(rows, context)
        choice = best_choice(
            self._acceptance.by_position(),
            [session.limit for session in self._population],
            lambda drafted: self._costs.speculative(rows, context, drafted),
        )
        if choice is None:
            return False
        self.length = choice.length
        self.rounds[Mode.SPECULATIVE] = choice.tokens, choice.seconds * (1.0 + _TAIL_A_DOUBLING * math.log2(rows))
        return True

    def optimistic_rate(self, since_s: float) -> float:
        """Rate of speculation, with a bonus where it was hardly measured: trying it corrects a wrong profile.

        ``since_s``: seconds since a round of it was timed.
        """
        if self._acceptance.num_judged < PRIOR_TOKENS:  # hardly anything is known of the acceptance either
            return self.rates[Mode.SPECULATIVE]
        num_rounds = self._costs.num_speculative_rounds(self.num_rows)
        unknown = max(0.0, 1.0 - num_rounds / _NUM_ROUNDS_WITHOUT_OPTIMISM)
        return self.rates[Mode.SPECULATIVE] * (1.0 + _MAX_OPTIMISM * min(max(unknown, since_s / _RENEWAL_S), 1.0))

    @property
    def mode_apart(self) -> Mode | None:
        """The mode that other coordinators' sessions are not in; None where there are none."""
        if not round(self._learner.other_rows.value):
            return None
        do_draft = self._learner.other_drafts.value > 0.5 * self.length
        return Mode.PLAIN if do_draft else Mode.SPECULATIVE

    def left_s(self, busy_s: float, *, is_speculating: bool) -> float:
        """Time for which the sessions will be served: as requests take usually; where they have taken longer, or none
        has ended, as long again as so far.
        """
        sessions = [session for session in self._population if session.limit]
        left_s = self.plain_round_s * sum(session.num_left for session in sessions) / max(len(sessions), 1)
        served = [busy_s - session.began_s for session in sessions if session.began_s is not None]
        if not served:
            return left_s
        served_s = sum(served) / len(served)
        if self.request_s.num_samples:
            usual_s = self.request_s.value - served_s
            return min(left_s, usual_s if usual_s > 0.0 else served_s)
        return min(left_s, served_s if served_s and not is_speculating else _DEFAULT_REQUEST_S)

    def text_seconds(self, num_tokens: float) -> float:
        """Time in which drafts take in text; those that read hidden states have the target compute it again."""
        again_s = self._costs.scored_token_seconds if self._population.reads_states else 0.0
        return num_tokens * (again_s + self._costs.text_token_seconds)
