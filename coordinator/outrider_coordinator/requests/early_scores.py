"""Early scores: answers of a target to proposals that went to it directly, and have not come here yet.

The two come by different links. Scores are judged by the proposals that came here, so they wait for these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from outrider.batched import AnswerBatch, Column
from outrider.ports import EventBatch, ForwardReport, TargetEvent
from outrider_coordinator.routing.services import TargetReplica
from outrider_coordinator.session.prepared import Bools

_Batch: TypeAlias = EventBatch[TargetEvent]
_Columns: TypeAlias = AnswerBatch[TargetEvent]


class EarlyScores:
    """Early scores of one coordinator."""

    def __init__(self, are_early: Callable[[Column, Column], Bools]) -> None:
        """``are_early``: sessions and generations [B] to whether each waits for the proposal that the scores are of."""
        self._are_early = are_early
        self._held: list[tuple[TargetReplica, _Batch]] = []

    def are_held(self, replica: TargetReplica) -> bool:
        """True if there are any of a target."""
        return any(found is replica for found, _ in self._held)

    def hold(self, replica: TargetReplica, batch: _Batch) -> _Batch | None:
        """Rest of a message without early scores; None if nothing is left."""
        parts = [self._parts(batched) for batched in batch.batched]
        early = tuple(own for own, _ in parts if own is not None)
        if not early:
            return batch
        self._held.append((replica, EventBatch((), batch.report, batched=early)))
        left = tuple(others for _, others in parts if others is not None)
        if not (batch.events or left):
            return None
        return replace(batch, report=_end_of(batch.report), batched=left)

    def _parts(self, batched: _Columns) -> tuple[_Columns | None, _Columns | None]:
        """Early scores, and the others; those of different proposals may come in the same arrays."""
        if batched.draft_token_ids is None:
            return None, batched
        are_early = self._are_early(batched.sessions, batched.generations)
        if are_early.all():
            return batched, None
        if not are_early.any():
            return None, batched
        return batched.selected(np.flatnonzero(are_early)), batched.selected(np.flatnonzero(~are_early))

    def take(self) -> list[tuple[TargetReplica, _Batch]]:
        """All of them, since proposals have come; they may have to be held again."""
        held, self._held = self._held, []
        return held


def _end_of(report: ForwardReport | None) -> ForwardReport | None:
    """Report for the rest of a message: times and sizes are told once, with the early scores."""
    return None if report is None else ForwardReport(0, 0, 0, 0, 0, 0, report.num_pages_free, report.ended_ns)
