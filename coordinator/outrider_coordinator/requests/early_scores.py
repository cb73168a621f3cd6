"""Early scores: answers of a target to proposals that went to it directly, and have not come here yet.

The two come by different links. Scores are judged by the proposals that came here, so they wait for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from outrider.columns import AnswerColumns
from outrider.ports import EventBatch, ForwardReport, ItemTiming, Scores, TargetEvent
from outrider_coordinator.routing.services import TargetReplica

_Batch: TypeAlias = EventBatch[TargetEvent]


class EarlyScores:
    """Those of one coordinator."""

    def __init__(self, is_early: Callable[[int, int], bool]) -> None:
        """``is_early``: true if a session waits for the proposal that scores of this generation are of."""
        self._is_early = is_early
        self._held: list[tuple[TargetReplica, _Batch]] = []

    def are_held(self, replica: TargetReplica) -> bool:
        """True if there are any of a target."""
        return any(found is replica for found, _ in self._held)

    def hold(self, replica: TargetReplica, batch: _Batch) -> _Batch | None:
        """What is left of a message without early scores; None if nothing is."""
        if not (any(columns.draft_token_ids is not None for columns in batch.columns) or batch.events):
            return batch
        columns = [each for each in batch.columns if self._is_early(each.sessions.item(0), each.generations.item(0))]
        are_early = [
            isinstance(each, Scores) and self._is_early(each.session, each.generation) for each in batch.events
        ]
        if not columns and not any(are_early):
            return batch
        timed = list(zip(are_early, batch.events, batch.timings or [None] * len(are_early), strict=True))
        events = [(event, timing) for is_early, event, timing in timed if is_early]
        rest = [(event, timing) for is_early, event, timing in timed if not is_early]
        self._held.append((replica, _batch_of(events, batch.report, columns)))
        held = set(map(id, columns))
        left = [each for each in batch.columns if id(each) not in held]
        return _batch_of(rest, _end_of(batch.report), left) if rest or left else None

    def take(self) -> list[tuple[TargetReplica, _Batch]]:
        """All of them, since proposals have come; they may have to be held again."""
        held, self._held = self._held, []
        return held


def _end_of(report: ForwardReport | None) -> ForwardReport | None:
    """Which forward it was, for the rest of a message: times and sizes are told once, with the early scores."""
    return None if report is None else ForwardReport(0, 0, 0, 0, 0, 0, report.num_pages_free, report.ended_ns)


def _batch_of(
    timed: Sequence[tuple[TargetEvent, ItemTiming | None]],
    report: ForwardReport | None,
    columns: Sequence[AnswerColumns[TargetEvent]],
) -> _Batch:
    timings = tuple(timing for _, timing in timed if timing is not None)
    return EventBatch(tuple(event for event, _ in timed), report, timings, tuple(columns))
