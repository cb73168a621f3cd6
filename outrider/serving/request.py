"""Requests: items between arrival and answer, their queue, and the batches that serve them.

Owns the status and the stage times of a request. The order of service is the scheduler's.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias

from outrider.ports import Extend, ItemTiming, Score
from outrider.recording import ForwardRecord, ItemRecord, is_sampled
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import (
    CommonEvent,
    EventT,
    ExecutorOutput,
    InFlightForward,
    Item,
    ItemT,
    JobT,
    QueuedForward,
)
from outrider.serving.session import Session, SessionKey
from outrider.serving.token_budget import is_running
from outrider.values import step_value


@dataclass(slots=True)
class RunningJob:
    """The job of an item of a step that runs: nothing is left to be scheduled."""

    num_left: int = 0
    num_last: int = 1


class RequestStatus(enum.Enum):
    """Status of a request."""

    WAITING = "waiting"
    """Queued; no forward has served it."""
    PREFILLING = "prefilling"
    """Queued again: some of its tokens were computed, the others take more forwards."""
    RUNNING = "running"
    """Running in a batch that was started and has not ended: its session's sequence may not be cut."""
    PREPARED = "prepared"
    """Computed before its item arrived; the answer is held until then."""
    FINISHED = "finished"
    """Answered."""
    ABORTED = "aborted"
    """Aborted without an answer."""


@dataclass(slots=True, eq=False)
class Request(Generic[ItemT, JobT, EventT]):
    """One item of a session, asked for or prepared."""

    session: Session[Any]
    item: ItemT
    job: JobT
    arrived_ns: int
    is_asked: bool = True
    """False while it is computed under a ``Prepare`` and its item has not come."""
    is_guess: bool = False
    """Nothing will ask for it: its proposal is pushed (``decode.drafts_ahead``)."""
    status: RequestStatus = RequestStatus.WAITING
    num_batches: int = 0
    """Batches that were started with it and have not ended: one, or two with a chunk of its prompt each."""
    superseded_by: tuple[ItemT, int] | None = None
    """The newer item of its session, which arrived while this one was running, and the time of arrival."""
    answer: EventT | CommonEvent | None = None
    """None until it is finished or prepared."""
    waiting_since_ns: int = field(init=False)
    """Time of its arrival, or of the end of the last forward that served it."""
    queue_ns: int | None = None
    """None until a forward has served it."""
    forward_ns: int = 0
    sample_ns: int = 0
    wait_ns: int = 0
    mask_ns: int = 0
    batch_size: int = 0
    """Batch size of the last forward that served it."""
    num_tokens: int = 0
    """Tokens of the last forward that served it."""
    forward_ended_ns: int = 0
    """End of the last forward that served it, whenever its item came."""
    _record: ItemRecord | None = None

    def __post_init__(self) -> None:
        self.waiting_since_ns = self.arrived_ns

    @property
    def has_output(self) -> bool:
        """True if its session's text goes past the prompt: its user has received output."""
        return self.item.num_kept_tokens + len(self.item.token_ids) > self.session.open.prompt_length

    @property
    def is_text_alone(self) -> bool:
        """True if it is a draft prefill without a proposal. No step waits for that, so it is not known when its
        session comes back; but for long prompts under fixed lengths on the target's device, where it does at once.
        """
        return isinstance(self.item, Extend) and not self.item.draft_length

    @property
    def record(self) -> ItemRecord | None:
        """The record of its item; None when that is not traced."""
        if self._record is None and is_sampled(self.item.trace_parent):
            item = self.item
            self._record = ItemRecord(item.trace_parent, item.session, item.generation, self.arrived_ns)
        return self._record

    def ask(self, item: ItemT, arrived_ns: int) -> None:
        """The item that this was prepared for has come: its time begins now, whatever was done before."""
        self.item, self.is_asked = item, True
        self.arrived_ns = self.waiting_since_ns = arrived_ns
        self.queue_ns, self.forward_ns, self.sample_ns, self.wait_ns, self.mask_ns = None, 0, 0, 0, 0

    def finish(self, answer: EventT | CommonEvent) -> None:
        """Take the answer, which names the item that was asked even where it was computed for the prepared one."""
        self.status, self.answer = RequestStatus.FINISHED, answer
        if answer.generation != self.item.generation:
            self.answer = replace(answer, generation=self.item.generation)  # type: ignore[type-var]

    def note_forward(self, done: ForwardRecord) -> None:
        """A forward served it. Each stage lies between two readings of the clock; none is what the others leave.

        The item of a prepared step may have come while the forward ran: only what was left of it then is its time.
        """
        if self.status is not RequestStatus.ABORTED and (record := self.record) is not None:
            record.note_forward(done, self.waiting_since_ns)
        started = max(done.started_ns, self.waiting_since_ns)
        computed = max(done.computed_ns, started)
        idle = started - self.waiting_since_ns
        if self.queue_ns is None:
            self.queue_ns = idle
        else:
            self.wait_ns += idle
        self.forward_ns += computed - started
        self.sample_ns += done.ended_ns - computed
        self.mask_ns += done.mask_ns
        self.waiting_since_ns = self.forward_ended_ns = done.ended_ns
        self.batch_size, self.num_tokens = done.batch_size, done.num_tokens

    def timing(self, now_ns: int) -> ItemTiming:
        """Stage times of the request, if it is answered now."""
        # By position: by name it takes twice as long.
        return ItemTiming(
            self.queue_ns or 0,
            self.forward_ns,
            self.sample_ns,
            self.wait_ns + now_ns - self.waiting_since_ns,
            now_ns - self.arrived_ns,
            self.mask_ns,
        )


AnyRequest: TypeAlias = Request[Any, Any, Any]


class RequestQueue:
    """Requests of all sessions. A session has at most one that is to be computed, and before it a few prepared ones."""

    def __init__(self) -> None:
        self._due: dict[SessionKey, AnyRequest] = {}
        self._prepared: dict[SessionKey, deque[AnyRequest]] = {}
        self.num_puts = 0
        """Requests that were put so far; those that are due yet are the last of ``due``, in this order."""

    @property
    def due(self) -> Collection[AnyRequest]:
        """Requests that wait or run, in the order in which they were last served, longest ago first."""
        return self._due.values()

    def put_since(self, num_puts: int) -> Iterator[AnyRequest]:
        """Requests that are due and were put since this many had been put, and perhaps older ones."""
        return itertools.islice(reversed(self._due.values()), self.num_puts - num_puts)

    @property
    def is_empty(self) -> bool:
        """True if nothing is due and nothing held."""
        return not self._due and not self._prepared

    def put(self, request: AnyRequest) -> None:
        """Append a request that is to be computed."""
        self._due[request.session.key] = request
        self.num_puts += 1

    def remove(self, request: AnyRequest) -> None:
        """Take a request that is due out of the queue."""
        del self._due[request.session.key]

    def due_of(self, key: SessionKey) -> AnyRequest | None:
        """The request of a session that is to be computed."""
        return self._due.get(key)

    def hold(self, request: AnyRequest) -> None:
        """Keep a prepared request, after all others of its session."""
        request.status = RequestStatus.PREPARED
        self._prepared.setdefault(request.session.key, deque()).append(request)

    def pop_prepared(self, key: SessionKey) -> None:
        """Remove the oldest prepared request of a session; ``KeyError`` where there is none."""
        prepared = self._prepared[key]
        prepared.popleft()
        if not prepared:
            del self._prepared[key]

    def take_prepared(self, key: SessionKey) -> list[AnyRequest]:
        """Remove all prepared requests of a session, the oldest first; mostly there is none."""
        return list(self._prepared.pop(key, ()))

    def last_prepared(self, key: SessionKey) -> AnyRequest | None:
        """The newest prepared request of a session."""
        prepared = self._prepared.get(key)
        return prepared[-1] if prepared else None

    def first(self, key: SessionKey) -> AnyRequest | None:
        """The oldest request of a session: what it has asked for, or will ask for next."""
        prepared = self._prepared.get(key)
        return prepared[0] if prepared else self._due.get(key)

    def num_unasked(self, key: SessionKey) -> int:
        """Requests of a session that are computed or to be computed, and not asked for."""
        due = self._due.get(key)
        return len(self._prepared.get(key, ())) + (due is not None and not due.is_asked)

    def abort(self, key: SessionKey) -> list[AnyRequest]:
        """Give up all requests of a session; returns them."""
        aborted = list(self._prepared.pop(key, ()))
        due = self._due.pop(key, None)
        if due is not None:
            aborted.append(due)
        for request in aborted:
            request.status, request.superseded_by = RequestStatus.ABORTED, None
        return aborted

    def keys_of(self, link_id: int) -> list[SessionKey]:
        """Sessions of a link that have requests."""
        return [key for key in dict.fromkeys((*self._due, *self._prepared)) if key[0] == link_id]


ScheduledTokens: TypeAlias = list[tuple[AnyRequest, int]]
"""Requests that share a forward, each with its tokens in it."""


@dataclass(slots=True, eq=False)
class Batch:
    """One forward: the requests that share it, and their tokens.

    A batch may be queued behind another, as one more plain step of the requests of that one: its tokens are known to
    the device alone, and its requests once the batch before has ended.
    """

    scheduled: ScheduledTokens
    started_ns: int
    after: Batch | None = None
    """The batch that it is queued behind, until that one has ended."""
    may_queue_next: bool = True
    """True if something has happened since the last attempt to queue a batch behind it."""
    queue_chunks_ns: int | None = None
    """Time to queue the next chunks of prompts behind it; None: never, or it was tried."""
    num_running: int = 0
    """Requests of sessions that run, rather than have a prompt taken in."""
    prefills: Sequence[AnyRequest] = ()
    """Requests that have a prompt taken in."""
    num_prefill_tokens: int = 0
    """Tokens of those."""
    plain: LookaheadStep | None = None
    """A step of many sessions that is computed before it is asked for, beside the requests."""
    removed_rows: list[int] = field(default_factory=list)
    """Rows of that step whose sessions were removed from it: their requests are the last of ``scheduled``."""
    decode: DecodeBatch | None = None
    """The step that it serves, instead of requests, as long as nothing else comes for one of its sessions."""
    forward: InFlightForward[Any] = field(init=False)
    """Set when it is started."""
    queued: QueuedForward[Any, Any] = field(init=False)
    """Set when it is started behind another: that forward, with its jobs."""
    record: ForwardRecord = field(init=False)
    """Set when its forward has ended."""

    @property
    def requests(self) -> list[AnyRequest]:
        """The requests that it serves."""
        return [request for request, _ in self.scheduled]

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, and of the step beside them."""
        return sum(num_tokens for _, num_tokens in self.scheduled) + self._num_others

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of its forward, also of a step, and of one that is queued behind another."""
        decode, before = self.decode, self.after
        if decode is not None:
            return decode.num_tokens
        return self.num_tokens or (1 if before is None else before.num_rows)

    @property
    def num_rows(self) -> int:
        """Sessions that share it."""
        return len(self.scheduled) + self._num_others

    @property
    def rows_by_link(self) -> Mapping[int, int]:
        """Sessions that share it, by link; those that have ended are left out."""
        if self.decode is not None:
            return {self.decode.link_id: len(self.decode)}
        rows = Counter([request.session.link_id for request in self._live])
        if self.plain is not None:
            rows.update(self.plain.own.link_ids[self.plain.is_here].tolist())
        return rows

    def rows_ahead(self) -> Iterator[tuple[Session[Any], int, int | None]]:
        """Sessions whose items had not come when the forward began: each with the length of the text after which it
        draws or scores draft tokens, and the time at which the item came, if it has.
        """
        step, plain, began = self.decode, self.plain, self.record.started_ns
        if step is not None and not (step.is_asked and step.arrived_ns <= began):
            asked_ns = step.arrived_ns if step.is_asked else None
            bases = step.bases + bool(step.batched.channel and not step.is_asked and not step.is_scoring)
            yield from [(session, base, asked_ns) for session, base in zip(step.sessions, bases.tolist(), strict=True)]
        if plain is not None:
            rows = zip(plain.sessions, plain.bases.tolist(), plain.is_asked, plain.arrived_ns.tolist(), strict=True)
            for place, (session, base, is_asked, arrived_ns) in enumerate(rows):
                if plain.is_here[place] and not (is_asked and arrived_ns <= began):
                    yield session, base, arrived_ns if is_asked else None
        for request in self._live:
            if not request.is_asked or request.arrived_ns > began:
                base = request.item.num_kept_tokens + len(request.item.token_ids) + request.is_guess
                yield request.session, base, request.arrived_ns if request.is_asked else None

    @property
    def drafts_by_link(self) -> Mapping[int, int]:
        """Draft tokens of those sessions."""
        if self.decode is not None:
            return {self.decode.link_id: sum(self.decode.draft_lengths.tolist())}
        drafts = Counter[int]()
        for request in self._live:
            drafts[request.session.link_id] += num_drafts(request.item)
        return drafts

    @property
    def _live(self) -> list[AnyRequest]:
        return [request for request, _ in self.scheduled if request.status is not RequestStatus.ABORTED]

    @property
    def _num_others(self) -> int:
        """Sessions without requests."""
        return 0 if self.plain is None else len(self.plain) - len(self.removed_rows)

    def run(self, scheduled: ScheduledTokens, started_ns: int) -> None:
        """The batch is what the device computes now, and these are its requests."""
        self.scheduled, self.started_ns, self.after = scheduled, started_ns, None
        prefills = [(request, num_tokens) for request, num_tokens in scheduled if not is_running(request.job)]
        self.prefills = [request for request, _ in prefills]
        self.num_running = self.num_rows - len(prefills)
        self.num_prefill_tokens = sum(num_tokens for _, num_tokens in prefills)
        for request, _ in scheduled:
            request.num_batches += 1
            if request.status is not RequestStatus.ABORTED:
                request.status = RequestStatus.RUNNING


@step_value(frozen=True, slots=True)
class FinishedBatch:
    """A batch whose forward has ended."""

    batch: Batch
    output: ExecutorOutput[Any]
    ended_ns: int


def num_drafts(item: Item) -> int:
    """Draft tokens of an item: scored by a target, or asked of a draft."""
    if isinstance(item, Extend):
        return item.draft_length
    return len(item.draft_token_ids) if isinstance(item, Score) else 0
