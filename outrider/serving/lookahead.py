"""Lookahead: plain steps that are computed before they are asked for.

A ``Prepare`` gives a session credit for this many steps. If an answer says by itself which token comes next, that step
is due as soon as the answer was found, and one more is queued behind it on the device. An item that asks for just that
finds it running or done. Any other item is served as if nothing had been prepared, so a wrong expectation costs time
and never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.errors import OutriderError
from outrider.serving.executor import CommonEvent, Executor, QueuedForward
from outrider.serving.request import AnyRequest, Batch, Request, RequestQueue, RequestStatus, ScheduledTokens
from outrider.serving.session import Session, SessionKey
from outrider.serving.stats import ServiceStats
from outrider.serving.token_budget import Job

MAX_STEPS_AHEAD = 2
"""Steps of a session that are computed or being computed, and not asked for: the coordinator has two forwards' time to
ask, and a session that ends by itself wastes no more than two rows."""


class Lookahead:
    """Prepared steps of all sessions."""

    def __init__(
        self,
        executor: Executor[Any, Any, Any, Any],
        queue: RequestQueue,
        *,
        is_enabled: bool,
        stats: ServiceStats,
        clock: Callable[[], int],
    ) -> None:
        self._executor, self._queue, self._is_enabled = executor, queue, is_enabled
        self._stats, self._clock = stats, clock
        self.take_guess: Callable[[AnyRequest], None] = lambda request: None
        """Takes a request that nothing will ask for, with its answer, or with none where it was dropped."""
        self._speculating: set[SessionKey] = set()
        """Sessions whose newest item has drafts: what is computed for others meanwhile would make them wait."""

    # Credit.

    def grant(self, session: Session[Any], num_steps: int) -> None:
        """Let ``num_steps`` plain steps after a session's newest item be computed before they are asked for."""
        session.lookahead_credit = max(0, num_steps - self._queue.num_unasked(session.key))
        newest = self._queue.last_prepared(session.key)
        if newest is not None:
            self.prepare(newest)

    def revoke(self, session: Session[Any]) -> None:
        """Take back a session's credit: it has asked for something else."""
        session.lookahead_credit = 0

    def note_item(self, session: Session[Any], job: Job) -> None:
        """A session has asked for a step that was not prepared."""
        if job.num_left == 1:
            self._spend(session)
            self._speculating.discard(session.key)
            return
        self.revoke(session)
        if job.num_last > 1:
            self._speculating.add(session.key)

    def note_drafts(self, sessions: Sequence[Session[Any]]) -> None:
        """Sessions have asked for steps with drafts."""
        for session in sessions:
            self.revoke(session)
            self._speculating.add(session.key)

    def note_end(self, key: SessionKey) -> None:
        """A session has ended."""
        self._speculating.discard(key)

    def drop_link(self, link_id: int) -> None:
        """All sessions of a link have ended."""
        self._speculating = {key for key in self._speculating if key[0] != link_id}

    @property
    def is_possible(self) -> bool:
        """True if ``prepare`` could do anything for any session."""
        return self._is_enabled and not self._speculating

    @property
    def is_idle(self) -> bool:
        """True if no session keeps others from being prepared."""
        return not self._speculating

    def _may_prepare(self, session: Session[Any]) -> bool:
        """True if one more step of a session may be computed before it is asked for."""
        if self._speculating or not self._is_enabled or not session.lookahead_credit:
            return False
        return self._queue.num_unasked(session.key) < MAX_STEPS_AHEAD

    @staticmethod
    def _spend(session: Session[Any]) -> None:
        session.lookahead_credit = max(0, session.lookahead_credit - 1)

    # Preparing.

    def prepare(self, request: AnyRequest) -> bool:
        """Make the step after a request's answer due; False where it is not to be computed yet."""
        session, answer = request.session, request.answer
        if answer is None or isinstance(answer, CommonEvent) or self._queue.due_of(session.key) is not None:
            return False
        if not self._may_prepare(session):
            return False
        item = self._executor.next_step(session, answer)
        if item is None:
            return False
        job = self._executor.begin(session, item)
        self._spend(session)
        self._queue.put(Request(session, item, job, self._clock(), is_asked=False))
        return True

    def begin(self, session: Session[Any], item: Any, *, is_guess: bool = False) -> None:  # noqa: ANN401
        """Make an item due that a session will ask for, by a verdict; its sequence was cut to what is kept.
        ``is_guess``: it will not ask for it, and ``take_guess`` takes the answer.
        """
        job = self._executor.begin(session, item)
        self._queue.put(Request(session, item, job, self._clock(), is_asked=False, is_guess=is_guess))

    def may_queue_next(self, batch: Batch) -> bool:
        """True if one more step of all requests of a running batch may be queued behind it: nothing else waits."""
        if not batch.may_queue_next:
            return False
        batch.may_queue_next = False
        if batch.decode is not None:
            return False
        if len(self._queue.due) > len(batch.scheduled):
            return False
        return all(
            request.status is RequestStatus.RUNNING
            and request.superseded_by is None
            and self._may_prepare(request.session)
            for request, _ in batch.scheduled
        )

    def resolve(self, queued: Batch, before: Batch) -> None:
        """Set the requests of a batch that is queued behind ``before``, now that ``before`` has ended."""
        forward, now = queued.queued, self._clock()
        scheduled: ScheduledTokens = []
        for index, (job, place) in enumerate(zip(forward.jobs, forward.indices, strict=True)):
            scheduled.append((self._resolve(forward, index, job, before.scheduled[place][0], now), 1))
        queued.run(scheduled, now)

    def _resolve(
        self, forward: QueuedForward[Any, Any], index: int, job: Job, parent: AnyRequest, now_ns: int
    ) -> AnyRequest:
        answer, session = parent.answer, parent.session
        item = None
        if answer is not None and not isinstance(answer, CommonEvent):
            item = self._executor.resolve(forward, index, session, answer)
        request: AnyRequest = Request(session, item, job, now_ns, is_asked=False)
        if item is not None:
            self._spend(session)
            self._queue.put(request)
        else:
            request.status = RequestStatus.ABORTED
            self._stats.num_lookahead_unused += 1
        return request

    # Prepared steps.

    def match(self, key: SessionKey, item: Any) -> AnyRequest | None:  # noqa: ANN401
        """The prepared request that is what a session now asks for, due or done; None: there is none."""
        request = self._queue.first(key)
        if request is None or request.is_asked or not self._executor.matches(item, request.item):
            return None
        self._stats.num_lookahead_used += 1
        if request.status is RequestStatus.PREPARED:
            self._queue.pop_prepared(key)
            self.prepare(self._queue.last_prepared(key) or request)
        return request

    def hold(self, request: AnyRequest, result: Any) -> None:  # noqa: ANN401
        """A prepared request was computed: its answer waits. An error is dropped: the item, if it comes, is computed
        anew.
        """
        if isinstance(result, OutriderError):
            self._drop(request)
        elif request.is_guess:
            request.status, request.answer = RequestStatus.ABORTED, result
            self.take_guess(request)
        else:
            request.answer = result
            self._queue.hold(request)

    def discard(self, request: AnyRequest) -> None:
        """Drop a prepared request that is due, because there are no pages for it; its credit is given back."""
        self._queue.remove(request)
        request.session.lookahead_credit += 1
        self._drop(request)

    def _drop(self, request: AnyRequest) -> None:
        request.status = RequestStatus.ABORTED
        self._stats.num_lookahead_unused += 1
        if request.is_guess:
            self.take_guess(request)
