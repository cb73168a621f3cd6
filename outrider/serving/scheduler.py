"""Scheduler: the requests of the next forward, the number of tokens of each, and their state after it.

Owns the queue, the token budget, the delay of prompts, the budget of KV pages, and lookahead. Starts no forward and
sends nothing: that is the engine core's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import MAX_ROW_TOKENS, ScoreBatch
from outrider.errors import OutriderError
from outrider.recording import ForwardRecord
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.decode.lookahead_steps import LookaheadAnswers, LookaheadSteps
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import Executor, ExecutorOutput
from outrider.serving.lookahead import Lookahead
from outrider.serving.preemption import PageBudget
from outrider.serving.request import AnyRequest, Batch, RequestQueue, RequestStatus, ScheduledTokens
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ServiceStats
from outrider.serving.token_budget import (
    LONGEST_ABSENCE_NS,
    Job,
    PrefillChunkSize,
    PrefillDelayPolicy,
    TokenBudget,
    is_running,
    moving_mean,
    share_tokens,
)

_QUEUED_AFTER_RATIO = 0.75
"""Share of a batch's expected time after which the next chunks of prompts are queued behind it: early enough for the
device not to wait, and a prompt that comes before shares that forward."""
_PROMPT_TOKEN_WEIGHT = 0.25
"""The weight of the newest large chunk in what a token is expected to take."""


class Scheduler:
    """Schedules the requests of all sessions onto one device."""

    def __init__(
        self,
        sessions: SessionRegistry[Any],
        executor: Executor[Any, Any, Any, Any],
        budget: TokenBudget,
        *,
        lookahead: bool,
        preempt: Callable[[Session[Any]], None],
        stats: ServiceStats,
        clock: Callable[[], int],
    ) -> None:
        """``lookahead``: a ``Prepare`` is served. ``preempt`` ends a session for its pages."""
        self.queue = RequestQueue()
        self.lookahead = Lookahead(executor, self.queue, is_enabled=lookahead, stats=stats, clock=clock)
        self.plain = LookaheadSteps(sessions, executor, self.queue, self.lookahead, stats=stats, clock=clock)
        self._pages = PageBudget(sessions, executor, self.queue, self.lookahead, preempt)
        self._delay = PrefillDelayPolicy()
        self._budget, self._chunk_size = budget, PrefillChunkSize(budget.max_mixed_prefill_tokens)
        self._executor, self._stats, self._clock = executor, stats, clock
        self._prompt_token_ns = 0.0
        """Recent time of a token in a large chunk."""
        self._ran_ns = -LONGEST_ABSENCE_NS
        """Time at which a running session was served last."""
        self._running = set[SessionKey]()
        """Sessions that were answered and have not ended: prompts are cut smaller for them."""

    # Batches.

    def schedule(self, in_flight: Sequence[Batch]) -> Batch | None:
        """The batch to start next, beside those in flight; None: nothing is due, or the device has enough to do."""
        if not in_flight:
            return self._next_batch()
        if len(in_flight) > 1:
            return None
        if in_flight[0].plain is not None:
            if (behind := self._step_behind(in_flight[0])) is not None:
                return Batch([], self._clock(), after=in_flight[0], plain=behind)
        elif not self.plain.awaits(in_flight[0]) and self.lookahead.may_queue_next(in_flight[0]):
            return Batch([], self._clock(), after=in_flight[0])
        return self._next_chunks(in_flight[0]) if self.are_chunks_due(in_flight) else None

    @property
    def delay_s(self) -> float:
        """Seconds to delay the next batch: prompts wait while running sessions are expected back soon, and these for
        each other.
        """
        if self.plain.is_due:
            return 0.0
        running = {request.session.key for request in self.queue.due if is_running(request.job)}
        return self.gather_s(running) if running else 1e-9 * self._delay.wait_ns(self._clock())

    def gather_s(self, due: Collection[SessionKey]) -> float:
        """Seconds to delay running sessions for those that are away."""
        return 1e-9 * self._delay.gather_ns(due, self._chunk_size.forward_ns, self._clock())

    def update(self, batch: Batch, output: ExecutorOutput[Any], ended_ns: int) -> list[tuple[AnyRequest, Any]]:
        """Take in the results of a batch; returns the requests that were asked for and are done, each with its answer
        or error. Prepared ones are held, and those that need more forwards are queued again.
        """
        self._note_duration(batch, ended_ns)
        batch.record = _record(batch, output, ended_ns)
        self._note_forward(batch, batch.record)
        note_answer = self._delay.note_answer
        done = []
        for request, result in zip(batch.requests, output.results, strict=True):
            if request.status is RequestStatus.ABORTED:
                continue
            self.queue.remove(request)
            request.num_batches -= 1
            if result is None:
                if request.num_batches < 1:  # else its next chunk runs
                    request.status = RequestStatus.PREFILLING
                self.queue.put(request)
            elif not request.is_asked:
                self.lookahead.hold(request, result)
            else:
                done.append((request, result))
                if not isinstance(result, OutriderError) and not request.is_text_alone:
                    self._running.add(request.session.key)
                    note_answer(request.session.key, ended_ns)
        return done

    # Requests.

    def admits(self, session: Session[Any], job: Job) -> bool:
        """True if a session that begins would find KV pages for all of its job."""
        return self._pages.admits(session, job)

    def add(self, request: AnyRequest) -> None:
        """Queue a request."""
        self.lookahead.note_item(request.session, request.job)
        self.queue.put(request)

    def note_arrival(self, key: SessionKey, arrived_ns: int) -> None:
        """A session has sent an item."""
        self._delay.note_return(key, arrived_ns)

    def takes_decode_batch(self, step: DecodeBatch) -> bool:
        """True if the budget allows a forward of all items of a step; otherwise they share it one by one."""
        is_few = max(step.batched.counts.tolist()) <= MAX_ROW_TOKENS
        return is_few and step.num_tokens <= self._budget.max_batched_tokens

    def note_decode_batch(self, step: DecodeBatch) -> None:
        """The items of a step have come, and its forward has started."""
        for key in step.keys:
            self._delay.note_return(key, step.arrived_ns)
        if step.is_scoring:
            self.lookahead.note_drafts(step.sessions)

    def note_claimed(self, keys: Collection[SessionKey], arrived_ns: int) -> None:
        """Items have come that were computed before, and are answered."""
        for key in keys:
            self._delay.note_return(key, arrived_ns)
            self._delay.note_answer(key, arrived_ns)

    def note_decode_answers(self, step: DecodeBatch, batch: Batch, forward: ForwardRecord) -> None:
        """The items of a step were answered, or will be when they are asked for."""
        self._note_duration(batch, forward.ended_ns)
        self._stats.note_forward(forward, [forward.started_ns - step.arrived_ns] * len(step) if step.is_asked else ())
        if not step.is_asked:
            return
        for key in step.keys:
            self._delay.note_answer(key, forward.ended_ns)

    # Plain steps as arrays.

    @property
    def is_free(self) -> bool:
        """True if nothing is due and nothing held."""
        return self.queue.is_empty and self.plain.is_empty

    def take_plain(
        self, link_id: int, batched: ScoreBatch, arrived_ns: int
    ) -> tuple[list[LookaheadAnswers], NDArray[np.bool_]]:
        """``LookaheadSteps.take``."""
        answers, is_taken = self.plain.take(link_id, batched, arrived_ns)
        for number in batched.sessions[is_taken].tolist():
            self._delay.note_return((link_id, number), arrived_ns)
        return answers, is_taken

    def grant(self, session: Session[Any], num_steps: int) -> None:
        """Let ``num_steps`` plain steps after a session's newest item be computed before they are asked for."""
        if not self.plain.grant(session, num_steps):
            self.lookahead.grant(session, num_steps)

    def finish_plain(self, batch: Batch, ended_ns: int) -> list[LookaheadAnswers]:
        """Take in what a batch has computed of a plain step; the answers to what was asked for."""
        if batch.plain is None:
            return []
        answers = self.plain.finish(batch, batch.plain, batch.record)
        for own in answers:
            keys = own.keys
            self._running.update(keys)
            for key in keys:
                self._delay.note_answer(key, ended_ns)
        return answers

    def _step_behind(self, batch: Batch) -> LookaheadStep | None:
        if not batch.may_queue_next:
            return None
        batch.may_queue_next = False
        is_waited_for = any(request.status is not RequestStatus.RUNNING for request in self.queue.due)
        return None if is_waited_for else self.plain.step_behind(batch)

    def abort(self, key: SessionKey) -> list[AnyRequest]:
        """Give up a session's requests; returns them."""
        aborted = self.queue.abort(key)
        self._stats.num_lookahead_unused += sum(not request.is_asked for request in aborted)
        return aborted

    def end_session(self, key: SessionKey) -> None:
        """Forget a session that has ended."""
        self._running.discard(key)
        self._delay.note_end(key)
        self.lookahead.note_end(key)

    def drop_link(self, link_id: int) -> None:
        """Forget the sessions of a link."""
        self._running = {key for key in self._running if key[0] != link_id}
        self._delay.drop_link(link_id)
        self.lookahead.drop_link(link_id)

    # Chunks of prompts that are queued behind each other.

    def note_begin(self, batch: Batch, began_ns: int) -> None:
        """The device begins with a batch."""
        batch.started_ns = began_ns
        if batch.num_prefill_tokens and not batch.num_running and not self._running:
            expected_ns = self._prompt_token_ns * batch.num_prefill_tokens
            batch.queue_chunks_ns = began_ns + int(_QUEUED_AFTER_RATIO * expected_ns)

    def are_chunks_due(self, in_flight: Sequence[Batch]) -> bool:
        """True if it is time to try to queue chunks of prompts behind a batch."""
        if len(in_flight) != 1 or in_flight[0].queue_chunks_ns is None:
            return False
        return self._clock() >= in_flight[0].queue_chunks_ns

    def _next_chunks(self, before: Batch) -> Batch | None:
        """Batch to serve after a batch of prompts, if that ended now. None while sessions run, or where it would take
        pages from others: that waits for the end of the batch.
        """
        before.queue_chunks_ns = None
        if self._running or not self._executor.may_follow(before.forward):
            return None
        due = [request for request in self.queue.due if request.job.num_left]
        if any(request.superseded_by is not None or not request.is_asked for request in due):
            return None
        due.sort(key=lambda request: request.status is RequestStatus.RUNNING)  # they are being served
        scheduled = self._share(due, is_mixed=False)
        if not scheduled or not self._pages.has_capacity(scheduled):
            return None
        return Batch(scheduled, self._clock())

    # Contents of a batch.

    def _next_batch(self) -> Batch | None:
        now = self._clock()
        self.plain.grow()
        if (step := self.plain.due) is not None:
            scheduled = self._choose(now, len(step)) if 2 * len(step) <= self._budget.max_batched_tokens else None
            if scheduled is not None and self._pages.surely_fit(scheduled, len(step)):
                return Batch(scheduled, now, plain=step)
            self.plain.split_due()
        scheduled = self._pages.preempt_for(self._choose(now))
        return Batch(scheduled, now) if scheduled else None

    def _choose(self, now_ns: int, num_decode_rows: int = 0) -> ScheduledTokens:
        """Next requests to serve of those that are due, with this number of sessions of one token each."""
        due = list(self.queue.due)
        if not due:
            return []
        if not all(request.is_asked for request in due):
            due.sort(key=lambda request: not request.is_asked)  # what was asked for comes first
        if (wanted := self._all_that_run(due, num_decode_rows)) is not None:
            return list(zip(due, wanted, strict=True))
        is_mixed = bool(self._running) and now_ns - self._ran_ns < LONGEST_ABSENCE_NS
        return self._share(due, is_mixed=is_mixed or num_decode_rows > 0, num_decode_rows=num_decode_rows)

    def _share(self, due: Sequence[AnyRequest], *, is_mixed: bool, num_decode_rows: int = 0) -> ScheduledTokens:
        shares = share_tokens(
            [request.job for request in due],
            self._budget.max_batched_tokens - num_decode_rows,
            max_prefill=self._max_prefill(due, num_decode_rows),
            is_mixed=is_mixed,
            rebuilds=_rebuilds(due),
            links=[request.session.link_id for request in due],
        )
        return [(request, share) for request, share in zip(due, shares, strict=True) if share]

    def _max_prefill(self, due: Sequence[AnyRequest], num_decode_rows: int) -> int:
        if not self._budget.adapts_chunks:
            return self._budget.max_mixed_prefill_tokens
        running = [request.job.num_left for request in due if is_running(request.job)]
        num_decode_tokens = num_decode_rows + sum(running)
        return self._chunk_size.tokens(len(self._running), len(due) - len(running), num_decode_tokens)

    def _all_that_run(self, due: Sequence[AnyRequest], num_decode_rows: int) -> list[int] | None:
        """The tokens of all requests, where sessions run and fit into one forward; as nearly always."""
        jobs = [request.job for request in due]
        wanted = [job.num_left for job in jobs]
        room = self._budget.max_batched_tokens - num_decode_rows
        return wanted if sum(wanted) <= room and all(map(is_running, jobs)) else None

    # Measurements of a batch.

    def learn(self) -> None:
        """Update the delay policy with answers and returns noted so far; called when no answer waits for it."""
        self._delay.learn()

    def _note_duration(self, batch: Batch, ended_ns: int) -> None:
        duration_ns = ended_ns - batch.started_ns
        if batch.num_running:
            self._ran_ns = ended_ns
            self._chunk_size.note_forward(duration_ns, batch.num_prefill_tokens, batch.num_running)
        if batch.num_prefill_tokens:
            self._delay.note_chunk(duration_ns)
            if 2 * batch.num_prefill_tokens >= self._budget.max_batched_tokens:
                self._prompt_token_ns = moving_mean(
                    self._prompt_token_ns or None, duration_ns / batch.num_prefill_tokens, _PROMPT_TOKEN_WEIGHT
                )
        elif all(is_running(request.job) for request in self.queue.due):
            self._chunk_size.note_end_of_prompts()

    def _note_forward(self, batch: Batch, done: ForwardRecord) -> None:
        waits_ns = []
        for request in batch.requests:
            is_first = request.queue_ns is None and request.is_asked
            request.note_forward(done)
            if is_first:
                waits_ns.append(request.queue_ns or 0)
        if batch.plain is not None:
            waits_ns += batch.plain.waits_ns(done.started_ns)
        self._stats.note_forward(done, waits_ns)


def _record(batch: Batch, output: ExecutorOutput[Any], ended_ns: int) -> ForwardRecord:
    heads = batch.started_ns, output.computed_ns, ended_ns
    return ForwardRecord(*heads, batch.num_rows, batch.num_tokens, output.used_graph, output.masked_ns)


def _rebuilds(due: Sequence[AnyRequest]) -> list[int]:
    """Indices of the requests that rebuild a lost session, and of prompts that came no later, which may have been lost
    too: one that has begun before others, these as they came.

    Served in equal shares they would all be back late: a target that is killed every few seconds would then bring back
    none, and no stream would get on. Coordinators send first what has waited longest.
    """
    prefills = [index for index, request in enumerate(due) if not is_running(request.job)]
    newest_ns = max((due[index].arrived_ns for index in prefills if due[index].has_output), default=-1)
    lost = [index for index in prefills if due[index].arrived_ns <= newest_ns]
    return sorted(lost, key=lambda index: due[index].status is RequestStatus.WAITING)
