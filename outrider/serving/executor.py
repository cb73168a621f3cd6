"""Executor: what a service computes of an item, as its engine core sees it.

One interface for the target, the draft model and the n-gram draft. The defaults are those of an executor that computes
when it is asked to, holds no KV pages and knows nothing of lookahead, so the simplest has only ``begin`` and
``execute``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from outrider.errors import OutriderError
from outrider.ports import Opened, Preempted, Refused, SessionFailed, SessionLost
from outrider.prefix_hash import PrefixHash
from outrider.serving.session import SequenceT, Session
from outrider.serving.token_budget import Job


class Item(Protocol):
    """What ``Extend`` and ``Score`` have in common."""

    @property
    def session(self) -> int:
        """The session's number on its link."""
        ...

    @property
    def generation(self) -> int:
        """The item's."""
        ...

    @property
    def num_kept_tokens(self) -> int:
        """Tokens to keep."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Committed tokens after those."""
        ...

    @property
    def prefix_hash(self) -> PrefixHash:
        """Of those."""
        ...

    @property
    def trace_parent(self) -> str:
        """Empty when it is not traced."""
        ...


class Answer(Protocol):
    """What ``Proposal`` and ``Scores`` have in common."""

    @property
    def generation(self) -> int:
        """Of the item that it answers."""
        ...

    @property
    def base_length(self) -> int:
        """Committed tokens that it builds on, all of them computed."""
        ...


ItemT = TypeVar("ItemT", bound=Item)
JobT = TypeVar("JobT", bound=Job)
EventT = TypeVar("EventT", bound=Answer)
EventT_co = TypeVar("EventT_co", bound=Answer, covariant=True)

CommonEvent = Opened | Preempted | SessionLost | SessionFailed | Refused
"""What any service may answer instead of its own."""


@dataclass(frozen=True, slots=True)
class ExecutorOutput(Generic[EventT_co]):
    """Results of one forward."""

    results: Sequence[EventT_co | OutriderError | None]
    """For each job: its answer, why its session fails, or None when it needs more forwards."""
    computed_ns: int
    """When the model was done and sampling began, by the core's clock, which is ``time.perf_counter_ns``."""
    used_graph: bool = False
    """Whether a captured forward was replayed."""
    pushed: Sequence[tuple[int, Any]] = ()
    """Events that answer no item, each with the number of its link. They leave with the next message."""


class InFlightForward(Protocol[EventT_co]):
    """A forward that was started."""

    def is_done(self) -> bool:
        """Whether ``finish`` would find the model done."""
        ...

    def finish(self) -> ExecutorOutput[EventT_co]:
        """Wait for the forward; called once."""
        ...


@dataclass(frozen=True, slots=True)
class QueuedForward(Generic[JobT, EventT_co]):
    """A forward over the tokens that the one before it draws, started before that one has ended."""

    forward: InFlightForward[EventT_co]
    jobs: Sequence[JobT]
    places: Sequence[int]
    """Of each job's session, among the jobs of the forward before."""


class Executor(ABC, Generic[SequenceT, ItemT, JobT, EventT]):
    """Checks items, turns them into jobs, and computes batches of jobs."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether a forward goes on by itself while the thread that started it does something else."""
        return False

    # KV pages.

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return 0

    def num_pages_needed(self, job: JobT, num_tokens: int) -> int:
        """Free KV pages that a forward over so many tokens of a job takes, what it writes in advance included."""
        return 0

    # Items.

    def check(self, session: Session[SequenceT], item: ItemT) -> EventT | None:
        """An answer that needs no forward, or None; ``InvalidRequestError`` for a bad item. Changes nothing."""
        return None

    def num_adoptable(self, session: Session[SequenceT], item: ItemT) -> int:
        """How many leading tokens of an item that keeps none may be taken from the prefix cache, if they are there."""
        return 0 if session.open.num_prompt_logprobs is not None else len(item.token_ids)

    @abstractmethod
    def begin(self, session: Session[SequenceT], item: ItemT) -> JobT:
        """The job of an item, once the session's sequence was cut to the item's base.

        The sequence is longer than that when the beginning of the item's ``token_ids`` was cached.
        """

    # Forwards.

    @abstractmethod
    def execute(self, batch: Sequence[tuple[JobT, int]]) -> ExecutorOutput[EventT]:
        """One forward over so many tokens of each of these jobs, and what is sampled from it."""

    def start(self, batch: Sequence[tuple[JobT, int]]) -> InFlightForward[EventT]:
        """``execute`` in two halves. Sequences grow now; until it is finished none of them may be cut."""
        return _Deferred(self, batch)

    # Lookahead: steps computed before they are asked for.

    def next_step(self, session: Session[SequenceT], answer: EventT) -> ItemT | None:
        """The plain step that follows an answer over the sequence as it is; None: the answer does not say, or is the
        session's last.
        """
        return None

    def queue_next(self, forward: InFlightForward[EventT]) -> QueuedForward[JobT, EventT] | None:
        """Start one more plain step of each session of a forward that goes on after it, before the forward has ended;
        None where that cannot be.
        """
        return None

    def confirm(
        self, queued: QueuedForward[JobT, EventT], index: int, session: Session[SequenceT], answer: EventT
    ) -> ItemT | None:
        """The item that job ``index`` turns out to be, now that the forward before was answered; None: it was computed
        over another token, and its token is taken back.
        """
        return None

    def matches(self, item: ItemT, prepared: ItemT) -> bool:
        """Whether an item asks for just what was prepared."""
        return False


@dataclass(frozen=True, slots=True)
class _Deferred(Generic[JobT, EventT]):
    """A forward that runs when it is finished."""

    executor: Executor[Any, Any, JobT, EventT]
    batch: Sequence[tuple[JobT, int]]

    def is_done(self) -> bool:
        """It never keeps its caller waiting for a device."""
        return True

    def finish(self) -> ExecutorOutput[EventT]:
        """All of it."""
        return self.executor.execute(self.batch)
