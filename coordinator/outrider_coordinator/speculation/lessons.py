"""Lessons: times and acceptance that messages told and controllers have not learned yet, since commands leave first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from outrider.ports import DraftEvent, EventBatch, ForwardReport, Proposal
from outrider_coordinator.speculation.controller import DraftLengthController
from outrider_coordinator.speculation.sessions import ControlledSession, SessionVerdict


class Lessons:
    """Verdicts and forward reports that wait to be learned."""

    def __init__(self, controller_of: Mapping[ControlledSession, DraftLengthController]) -> None:
        self._controller_of = controller_of
        self._ended: dict[DraftLengthController, ForwardReport | None] = {}
        """Controllers whose last message is not learned, and that message's report."""
        self._verdicts: list[SessionVerdict] = []

    def add_verdict(self, verdict: SessionVerdict) -> None:
        """A step was judged."""
        self._verdicts.append(verdict)

    def add_end(self, controller: DraftLengthController, report: ForwardReport | None) -> None:
        """A message has ended."""
        self._ended[controller] = report

    def learn_verdicts(self) -> None:
        """Learn all verdicts."""
        verdicts, self._verdicts = self._verdicts, []
        for controller, own in itertools.groupby(verdicts, key=lambda verdict: self._controller_of.get(verdict[0])):
            if controller is not None:
                controller.note_verdicts(own)

    def learn(self, controller: DraftLengthController) -> None:
        """Learn all verdicts, and the controller's last message."""
        self.learn_verdicts()
        if controller not in self._ended:
            return
        report = self._ended.pop(controller)
        if report is None:
            controller.end()
        else:
            controller.end(
                rows=report.batch_size,
                tokens=report.num_tokens,
                seconds=_seconds(report),
                other_rows=report.num_other_rows,
                other_drafts=report.num_other_drafts,
            )


def note_proposals(controller: DraftLengthController, batch: EventBatch[DraftEvent]) -> None:
    """Learn the durations of a draft's message, which may hold proposals or tell only of text that was taken in."""
    if batch.report is None:
        return
    lengths = [len(event.token_ids) for event in batch.events if isinstance(event, Proposal)]
    for batched in batch.batched:
        lengths += batched.counts.tolist()
    if any(lengths):
        num_rows = max(batch.report.batch_size, sum(length > 0 for length in lengths))
        controller.note_draft(num_rows, max(lengths), _seconds(batch.report))
    elif lengths:
        controller.note_draft_text()


def _seconds(report: ForwardReport) -> float:
    return 1e-9 * (report.forward_ns + report.sample_ns)
