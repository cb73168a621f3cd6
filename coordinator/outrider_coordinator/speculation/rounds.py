"""Rounds of one target's sessions: the verdicts of each message, and the step costs that are learned from them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.ports import ForwardReport
from outrider_coordinator.speculation.sessions import Mode
from outrider_coordinator.speculation.step_costs import Average, StepCosts

_NUM_COLD_ROUNDS = 12
"""First rounds of each mode that are not timed: a process's first forwards take several times as long."""


@dataclass(slots=True)
class Round:
    """Verdicts of one message."""

    now: float
    num_rows: int = 0
    num_drafting: int = 0
    num_drafted: int = 0
    longest: int = 0
    num_timed: int = 0
    sum_s: float = 0.0

    def note(self, began: float | None, num_drafted: int) -> None:
        """Add a verdict; ``began`` is the time at which its round began."""
        self.num_rows += 1
        if num_drafted:
            self.num_drafting += 1
            self.num_drafted += num_drafted
            self.longest = max(self.longest, num_drafted)
        if began is not None:
            self.num_timed += 1
            self.sum_s += self.now - began

    @property
    def seconds(self) -> float:
        """Mean duration of the sessions' rounds; 0 where most cannot be timed."""
        return self.sum_s / self.num_timed if 2 * self.num_timed > self.num_rows else 0.0


class RoundLearner:
    """Corrects the step costs by rounds, and counts the rows that other coordinators have in them."""

    def __init__(self, costs: StepCosts) -> None:
        self.current = Round(0.0)
        self.other_rows, self.other_drafts = Average(), Average()
        """Sessions of other coordinators in a forward, and draft tokens of each."""
        self._costs = costs
        self._had_drafts = False
        self._num_rounds = dict.fromkeys(Mode, 0)

    def note_draft(self, num_rows: int, draft_length: int, context: float, seconds: float) -> None:
        """Learn from the duration of proposals that were drawn together."""
        if draft_length and seconds > 0.0 and self._num_rounds[Mode.SPECULATIVE] >= _NUM_COLD_ROUNDS:
            self._costs.note_draft(num_rows, draft_length, context, seconds)

    def note_forward(self, report: ForwardReport, context: float) -> None:
        """Learn from the forward of the current round."""
        rows, tokens, seconds = report.batch_size, report.num_tokens, seconds_of(report)
        if rows:
            self.other_rows.note(report.num_other_rows)
            if report.num_other_rows:
                self.other_drafts.note(report.num_other_drafts / report.num_other_rows)
        if rows < tokens <= rows * (1 + self.current.longest) and seconds > 0.0 and not self._is_cold:
            self._costs.note_scoring(rows, tokens / rows, context, seconds)

    def note_round(
        self, report: ForwardReport | None, context: float, *, is_speculating: bool, is_disturbed: bool
    ) -> bool:
        """Learn from the duration of the current round; returns whether it was one of speculation.

        Nothing is learned of rounds with prompts or drafts' text, of plain ones beside other coordinators' drafts, nor
        of probes. Sessions whose grammar forces text draft nothing meanwhile: they count in the mean of drafted tokens.
        """
        found, drafts = self.current, self.current.num_drafting > 0
        had_drafts, self._had_drafts = self._had_drafts, drafts
        if is_disturbed or (report is not None and report.num_other_drafts and not drafts):
            return False
        self._num_rounds[Mode.SPECULATIVE if drafts else Mode.PLAIN] += 1
        if not found.seconds or self._is_cold:
            return False
        rows = found.num_rows + (0 if report is None else report.num_other_rows)
        if not (drafts or had_drafts):
            self._costs.note_plain_round(rows, context, found.seconds)
        elif is_speculating and drafts and had_drafts:
            drafted = found.num_drafted / found.num_rows
            self._costs.note_speculative_round(rows, drafted, found.longest, context, found.seconds)
            return True
        return False

    @property
    def _is_cold(self) -> bool:
        """True while the current round is among the first ones of its mode."""
        mode = Mode.SPECULATIVE if self.current.num_drafting else Mode.PLAIN
        return self._num_rounds[mode] <= _NUM_COLD_ROUNDS


def seconds_of(report: ForwardReport) -> float:
    """Time that a service computed."""
    return 1e-9 * (report.forward_ns + report.sample_ns)
