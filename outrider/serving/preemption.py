"""Page budget: which sessions keep their KV pages when there are not enough for all.

Sessions take pages as they grow, so the pool can run out in the middle. Then the youngest session is preempted: it ends
here with ``Preempted``, and its coordinator rebuilds it when there is room. A session's age is its request's arrival,
which survives rebuilds, so the oldest session always gets through. A new session is refused when the pages that are
free, or held by younger sessions, do not suffice for its whole text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias

from outrider.serving.executor import AsyncExecutor, EventT, ItemT, JobT, SequenceT
from outrider.serving.request_queue import RequestQueue
from outrider.serving.scheduled_request import ScheduledRequest
from outrider.serving.session_table import Session, SessionTable
from outrider.serving.stats import ServiceStats

_MOST_AHEAD = 66
"""Tokens that one launch writes for a session beyond those it was asked to append, at most: the longest draft."""
_WATERMARK = 100
"""One page of so many stays free for the sessions that run when a new one begins."""

Served: TypeAlias = list[tuple[ScheduledRequest[SequenceT, ItemT, JobT, EventT], int]]
"""Items of a forward, each with its tokens in it."""


class PageBudget(Generic[SequenceT, ItemT, JobT, EventT]):
    """The pages of one service."""

    def __init__(
        self,
        session_table: SessionTable[SequenceT],
        stage: AsyncExecutor[SequenceT, ItemT, JobT, EventT],
        request_queue: RequestQueue[SequenceT, ItemT, JobT, EventT],
        activity: ServiceStats,
    ) -> None:
        self._session_table, self._stage, self._request_queue, self._activity = (
            session_table,
            stage,
            request_queue,
            activity,
        )

    def admits(self, session: Session[SequenceT], job: JobT) -> bool:
        """Whether a session that begins would find pages for all of its job."""
        needed = self._stage.num_pages_needed(job, job.num_left)
        num_free = self._stage.num_pages_free
        if not needed:
            return True
        others = [other for other in self._session_table.sessions() if other is not session]
        older = [other for other in others if other.age < session.age]
        reserved = num_free // _WATERMARK if older else 0
        promised = sum(
            self._stage.num_pages_needed(pending.job, pending.job.num_left)
            for pending in self._request_queue.due
            if pending.session.age < session.age
        )
        of_younger = sum(self._session_table.num_pages(other) for other in others if other.age > session.age)
        return needed + promised + reserved <= num_free + of_younger

    def make_room(
        self, served: Served[SequenceT, ItemT, JobT, EventT], preempt: Callable[[Session[SequenceT]], None]
    ) -> Served[SequenceT, ItemT, JobT, EventT]:
        """What of a forward can be served, once ``preempt`` was called with the youngest sessions until there is room.

        Items that were not asked for go first: nothing is preempted for them.
        """
        if sum(share for _, share in served) + _MOST_AHEAD * len(served) <= self._stage.num_pages_free:
            return served  # no token takes more than a page
        needs = [self._stage.num_pages_needed(pending.job, share) for pending, share in served]
        if sum(needs) <= self._stage.num_pages_free:
            return served
        served = self._drop_foreseen(served)
        for victim in sorted(self._session_table.sessions(), key=lambda session: session.age, reverse=True):
            needs = [self._stage.num_pages_needed(pending.job, share) for pending, share in served]
            if sum(needs) <= self._stage.num_pages_free:
                break
            if self._session_table.num_pages(victim) or any(pending.session is victim for pending, _ in served):
                served = [(pending, share) for pending, share in served if pending.session is not victim]
                preempt(victim)
        return served

    def _drop_foreseen(self, served: Served[SequenceT, ItemT, JobT, EventT]) -> Served[SequenceT, ItemT, JobT, EventT]:
        asked = []
        for pending, share in served:
            if pending.foreseen is None:
                asked.append((pending, share))
            else:
                self._request_queue.take(pending)
                self._activity.num_foreseen_unused += 1
        return asked
