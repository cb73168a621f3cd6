"""What a service does with an item, as its core sees it.

Owns the seam between the order of things, which is the core's, and what is computed, which is a stage's. Computes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.errors import OutriderError
from outrider.ports import Opened, Preempted, Refused, SessionFailed, SessionLost
from outrider.serving.session_table import Session, TokenSequence
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
    def base_length(self) -> int:
        """Tokens to keep."""
        ...

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Committed tokens after those."""
        ...

    @property
    def prefix_hash(self) -> int:
        """Of those."""
        ...

    @property
    def trace_parent(self) -> str:
        """Empty when it is not traced."""
        ...


class Answer(Protocol):
    """What ``Proposal`` and ``Scores`` have in common."""

    @property
    def base_length(self) -> int:
        """Committed tokens that it builds on, all of them computed."""
        ...


SequenceT = TypeVar("SequenceT", bound=TokenSequence)
ItemT = TypeVar("ItemT", bound=Item)
JobT = TypeVar("JobT", bound=Job)
EventT = TypeVar("EventT", bound=Answer)
ItemT_contra = TypeVar("ItemT_contra", bound=Item, contravariant=True)
EventT_co = TypeVar("EventT_co", bound=Answer, covariant=True)

CommonEvent = Opened | Preempted | SessionLost | SessionFailed | Refused
"""What any service may answer instead of its own."""


@dataclass(frozen=True, slots=True)
class ExecutorOutput(Generic[EventT_co]):
    """What came of one forward."""

    results: Sequence[EventT_co | OutriderError | None]
    """For each job served: its answer, why its session fails, or None when it goes on."""
    computed_ns: int
    """When the model was done with it and sampling began, by the core's clock, which is ``time.perf_counter_ns``."""
    used_graph: bool = False
    """Whether a captured forward was replayed."""


class Executor(Protocol[SequenceT, ItemT_contra, JobT, EventT_co]):
    """What a service does with an item."""

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        ...

    def num_pages_needed(self, job: JobT, share: int) -> int:
        """Free KV pages that a forward over so many tokens of a job takes, what it writes in advance included."""
        ...

    def check(self, session: Session[SequenceT], item: ItemT_contra) -> EventT_co | None:
        """An answer that needs no forward, or None; ``InvalidRequestError`` for a bad item. Changes nothing."""
        ...

    def begin(self, session: Session[SequenceT], item: ItemT_contra) -> JobT:
        """What is to be computed, now that the session's text was cut to the item's base.

        The text is longer than that when the beginning of the item's ``token_ids`` was cached.
        """
        ...

    def advance(self, shares: Sequence[tuple[JobT, int]]) -> ExecutorOutput[EventT_co]:
        """One forward over so many tokens of each of these jobs."""
        ...


class InFlightForward(Protocol[EventT_co]):
    """A forward that was started."""

    def is_done(self) -> bool:
        """Whether ``finish`` would find the model done."""
        ...

    def finish(self) -> ExecutorOutput[EventT_co]:
        """Wait for it; called once."""
        ...


@dataclass(frozen=True, slots=True)
class QueuedForward(Generic[JobT, EventT_co]):
    """A forward over the tokens that the one before it draws, started before that one has ended."""

    flight: InFlightForward[EventT_co]
    jobs: Sequence[JobT]
    places: Sequence[int]
    """Of each job's session, among the jobs of the forward before."""


class AsyncExecutor(Executor[SequenceT, ItemT, JobT, EventT], Protocol[SequenceT, ItemT, JobT, EventT]):
    """A stage that can tell what it will be asked next; ``outrider.serving.sync_executor`` makes one of any other."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether a forward goes on by itself while the thread that started it does something else."""
        ...

    def start(self, shares: Sequence[tuple[JobT, int]]) -> InFlightForward[EventT]:
        """``advance`` in two halves. Texts grow now; until it is finished none that it serves may be cut."""
        ...

    def foresee(self, session: Session[SequenceT], answer: EventT) -> ItemT | None:
        """The item that most likely follows this answer, which was made over the text as it is; None: hard to say."""
        ...

    def follow(self, flight: InFlightForward[EventT]) -> QueuedForward[JobT, EventT] | None:
        """Start one more step of each session of a flight that is to go on after it, before the flight has ended; None
        where that cannot be. Every session asks for one token in it.
        """
        ...

    def confirm(
        self, following: QueuedForward[JobT, EventT], index: int, session: Session[SequenceT], answer: EventT
    ) -> ItemT | None:
        """The item that job ``index`` turns out to be, now that the flight before was answered; None: it was computed
        over something else, and is of no use.
        """
        ...

    def is_foreseen(self, item: ItemT, foreseen: ItemT) -> bool:
        """Whether an item asks for just what was foreseen."""
        ...

    def answer_to(self, item: ItemT, answer: EventT) -> EventT:
        """What was answered to the foreseen item, as the answer to the one that came."""
        ...
