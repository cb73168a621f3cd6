"""Expected rates of both modes of a target's sessions, and the time in which drafts take in text."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from outrider_coordinator.speculation.acceptance import PRIOR_TOKENS, Acceptance
from outrider_coordinator.speculation.goodput import Choice, best_choice
from outrider_coordinator.speculation.mode import Mode
from outrider_coordinator.speculation.rounds import RoundLearner
from outrider_coordinator.speculation.session_state import ControlledSession
from outrider_coordinator.speculation.step_costs import Average, StepCosts

_RENEWAL_S = 30.0
"""Seconds of plain decoding after which the optimism bonus is whole again, as if speculation were not measured."""
_MAX_OPTIMISM = 0.15
"""Share by which speculation may be faster than expected where it was hardly measured with as many sessions."""
_NUM_ROUNDS_WITHOUT_OPTIMISM = 24
"""Speculative rounds after which there is no optimism bonus."""
_TAIL_A_DOUBLING = 0.016
"""Share of the rate that speculation loses with each doubling of the sessions: they end at different times."""
_DEFAULT_REQUEST_S = 1.0
"""Seconds that a request is assumed to take before any has ended."""


class Expectation:
    """Rates that are expected of the sessions of one target."""

    def __init__(self, costs: StepCosts, acceptance: Acceptance, rounds: RoundLearner) -> None:
        self.rates = {Mode.PLAIN: 0.0, Mode.SPECULATIVE: 0.0}
        """Tokens per second of each mode at the last choice."""
        self.rounds: dict[Mode, tuple[float, float]] = dict.fromkeys(Mode, (0.0, 0.0))
        """Tokens and seconds of a round of each mode at the last choice."""
        self.length = 0
        """Draft length of that speculation."""
        self.request_s = Average()
        """Seconds that requests take."""
        self._costs, self._acceptance, self._learner = costs, acceptance, rounds

    @property
    def plain_round_s(self) -> float:
        """Seconds of a plain round."""
        return self.rounds[Mode.PLAIN][1]

    def num_rows(self, num_sessions: int) -> int:
        """Sessions in a forward, those of other coordinators included."""
        return num_sessions + round(self._learner.other_rows.value)

    def estimate(self, sessions: Sequence[ControlledSession], context: float) -> Choice | None:
        """Estimate both modes; returns the best speculation, None where no session may draft."""
        rows = self.num_rows(len(sessions))
        plain_s = self._costs.plain(rows, context)
        limits = [session.limit for session in sessions]
        choice = best_choice(
            self._acceptance.by_position(), limits, lambda drafted: self._costs.speculative(rows, context, drafted)
        )
        self.rounds[Mode.PLAIN] = len(sessions), plain_s
        self.rates[Mode.PLAIN] = len(sessions) / plain_s
        if choice is not None:
            self.length = choice.length
            self.rounds[Mode.SPECULATIVE] = choice.tokens, choice.seconds
            self.rates[Mode.SPECULATIVE] = choice.rate / (1.0 + _TAIL_A_DOUBLING * math.log2(rows))
        return choice

    def optimistic_rate(self, num_sessions: int, plain_for_s: float) -> float:
        """Rate of speculation, with a bonus where it was hardly measured: trying it corrects a wrong profile.

        ``plain_for_s``: seconds of plain decoding so far.
        """
        if self._acceptance.num_judged < PRIOR_TOKENS:  # hardly anything is known of the acceptance either
            return self.rates[Mode.SPECULATIVE]
        num_rounds = self._costs.num_speculative_rounds(self.num_rows(num_sessions))
        unknown = max(0.0, 1.0 - num_rounds / _NUM_ROUNDS_WITHOUT_OPTIMISM)
        return self.rates[Mode.SPECULATIVE] * (1.0 + _MAX_OPTIMISM * min(max(unknown, plain_for_s / _RENEWAL_S), 1.0))

    @property
    def mode_apart(self) -> Mode | None:
        """The mode that other coordinators' sessions are not in; None where there are none."""
        if not round(self._learner.other_rows.value):
            return None
        do_draft = self._learner.other_drafts.value > 0.5 * self.length
        return Mode.PLAIN if do_draft else Mode.SPECULATIVE

    def left_s(self, sessions: Collection[ControlledSession], busy_s: float, *, is_speculating: bool) -> float:
        """Time for which the sessions will be served: as requests take usually; before any has ended, as long again
        as so far.
        """
        left_s = self.plain_round_s * sum(session.num_left for session in sessions) / max(len(sessions), 1)
        served = [busy_s - session.began_s for session in sessions if session.began_s is not None]
        if not served:
            return left_s
        served_s = sum(served) / len(served)
        if self.request_s.num_samples:
            return min(left_s, max(self.request_s.value - served_s, 0.0))
        return min(left_s, served_s if served_s and not is_speculating else _DEFAULT_REQUEST_S)

    def text_seconds(self, num_tokens: float, *, reads_states: bool) -> float:
        """Time in which drafts take in text; those that read hidden states have the target compute it again."""
        again_s = self._costs.scored_token_seconds if reads_states else 0.0
        return num_tokens * (again_s + self._costs.text_token_seconds)
