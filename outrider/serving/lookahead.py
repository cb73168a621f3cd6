"""What is computed before it is asked for.

Where the stage can tell what it will be asked next, that is due as soon as the answer before it was found, and the step
after it is queued behind it. Who then asks for just that finds it under way or done; who asks for anything else is
served as if nothing had been foreseen. Owns how far that goes, and what becomes of what was foreseen. Refuses to know
when forwards begin and end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from outrider.errors import OutriderError
from outrider.serving.executor import AsyncExecutor, CommonEvent, EventT, ItemT, JobT, QueuedForward, SequenceT
from outrider.serving.lookahead_policy import LookaheadPolicy
from outrider.serving.request_queue import RequestQueue
from outrider.serving.running_batch import RunningBatch
from outrider.serving.scheduled_request import ScheduledRequest
from outrider.serving.session_table import SessionKey
from outrider.serving.stats import ServiceStats

_MOST_AHEAD = 2
"""Steps of a session that are computed or being computed, and not asked for: the coordinator has two forwards' time to
ask, and who ends unforeseen wastes no more than two rows."""


class LookaheadScheduler(Generic[SequenceT, ItemT, JobT, EventT]):
    """The steps of all sessions that are foreseen."""

    def __init__(
        self,
        stage: AsyncExecutor[SequenceT, ItemT, JobT, EventT],
        request_queue: RequestQueue[SequenceT, ItemT, JobT, EventT],
        *,
        activity: ServiceStats,
        clock: Callable[[], int],
    ) -> None:
        self.lookahead_policy = LookaheadPolicy()
        """To be told of every item and of every end."""
        self._stage, self._request_queue = stage, request_queue
        self._activity, self._clock = activity, clock

    def foresee(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT]) -> bool:
        """Whether a session's next item can be told from what was answered; it is due then."""
        session, answer = pending.session, pending.answer
        key = session.key
        if answer is None or isinstance(answer, CommonEvent) or self._request_queue.due_of(key) is not None:
            return False
        if not self.lookahead_policy.allows(key) or self._request_queue.num_foreseen(key) == _MOST_AHEAD:
            return False
        item = self._stage.foresee(session, answer)
        if item is None:
            return False
        job, now = self._stage.begin(session, item), self._clock()
        self._request_queue.put(ScheduledRequest(session, pending.generation, job, now, now, foreseen=item))
        return True

    def claim(self, key: SessionKey, item: ItemT) -> ScheduledRequest[SequenceT, ItemT, JobT, EventT] | None:
        """What was foreseen, if it is what a session now asks for: due, or answered; None: it is not."""
        pending = self._request_queue.first(key)
        if pending is None or pending.foreseen is None or not self._stage.is_foreseen(item, pending.foreseen):
            return None
        self._activity.num_foreseen_used += 1
        if pending.answer is not None and not isinstance(pending.answer, CommonEvent):
            self._request_queue.take_found(key)
            self.foresee(self._request_queue.last_found(key) or pending)
            pending.answer = self._stage.answer_to(item, pending.answer)
        return pending

    def as_asked(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT], result: EventT) -> EventT:
        """What was found for an item, which may have come since it was foreseen, as the answer to the one that came."""
        return result if pending.asked is None else self._stage.answer_to(pending.asked, result)

    def keep(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT], result: EventT | OutriderError) -> None:
        """It was computed, and nobody has asked for it: an answer waits. Of an error nothing is said; who asks has it
        anew.
        """
        if isinstance(result, OutriderError):
            self._activity.num_foreseen_unused += 1
            return
        pending.answer = result
        self._request_queue.keep_found(pending)

    def follow(self, started: RunningBatch[SequenceT, ItemT, JobT, EventT]) -> None:
        """Queue one more step of those that are under way behind it, unless somebody waits for anything else: the
        device then goes from one to the other.
        """
        started.may_be_followed = False
        if started.following is not None or len(self._request_queue.due) > len(started.served):
            return
        if all(self._may_go_on(pending) for pending in started.pendings):
            started.following = self._stage.follow(started.flight)

    def board(
        self, before: RunningBatch[SequenceT, ItemT, JobT, EventT]
    ) -> RunningBatch[SequenceT, ItemT, JobT, EventT] | None:
        """What followed a forward that has ended, under way now; None where nothing did."""
        following = before.following
        if following is None:
            return None
        served, now = [], self._clock()
        for index, (job, place) in enumerate(zip(following.jobs, following.places, strict=True)):
            parent = before.served[place][0]
            pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT] = ScheduledRequest(
                parent.session, parent.session.generation, job, now, now
            )
            pending.foreseen = self._confirm(following, index, parent)
            if pending.foreseen is not None:
                self._request_queue.put(pending)
            else:
                self._activity.num_foreseen_unused += 1
            served.append((pending, 1))
        return RunningBatch.of(following.flight, served, now)

    def _confirm(
        self,
        following: QueuedForward[JobT, EventT],
        index: int,
        parent: ScheduledRequest[SequenceT, ItemT, JobT, EventT],
    ) -> ItemT | None:
        answer = parent.answer
        if answer is None or isinstance(answer, CommonEvent):
            return None
        return self._stage.confirm(following, index, parent.session, answer)

    def _may_go_on(self, pending: ScheduledRequest[SequenceT, ItemT, JobT, EventT]) -> bool:
        """Whether the step after this one, which is under way, may be computed before it is asked for."""
        key = pending.session.key
        if not self._request_queue.is_due(pending) or pending.overtaken_by is not None:
            return False
        return self.lookahead_policy.allows(key) and self._request_queue.num_foreseen(key) < _MOST_AHEAD
