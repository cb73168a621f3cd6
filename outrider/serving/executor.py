"""Executor: the computation of a service, as its engine core uses it.

One interface for the target, the draft model and the n-gram draft. The defaults suit a synchronous executor without KV
pages and lookahead, so the simplest one implements only ``begin`` and ``execute``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.batched import AnswerBatch, CommandBatch, LogprobBatch
from outrider.errors import OutriderError
from outrider.ports import Opened, Preempted, Refused, SessionFailed, SessionLost
from outrider.prefix_hash import PrefixHash
from outrider.serving.session import SequenceT, Session
from outrider.serving.token_budget import Job

if TYPE_CHECKING:
    from outrider.serving.decode.lookahead_step import LookaheadStep
    from outrider.serving.decode.step import DecodeBatch


class Item(Protocol):
    """Common part of ``Extend`` and ``Score``."""

    @property
    def session(self) -> int:
        """The session's number on its link."""
        ...

    @property
    def generation(self) -> int:
        """The item's generation."""
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
        """Hash of the tokens to keep."""
        ...

    @property
    def trace_parent(self) -> str:
        """Empty if the item is not traced."""
        ...


class References(Protocol):
    """Resources that items refer to, such as tensors in another process's memory."""

    def fetch_all(self, commands: Sequence[Any]) -> Sequence[Any]:
        """The commands of one message, with what they refer to where it is there."""
        ...

    def fetch_batch(self, batched: CommandBatch, *, are_kept: bool = False) -> CommandBatch:
        """The commands with what they refer to; as they are, and nothing read, where not all of it is there.
        ``are_kept``: other commands may refer to it again.
        """
        ...

    def fetch(self, item: Any) -> Any:  # noqa: ANN401 - an item of the service
        """The item with what it refers to; ``StaleReferenceError`` where that is not there, and the session is lost."""
        ...


class Answer(Protocol):
    """Common part of ``Proposal`` and ``Scores``."""

    @property
    def generation(self) -> int:
        """Generation of the answered item."""
        ...

    @property
    def base_length(self) -> int:
        """Number of committed tokens that it builds on, all of them computed."""
        ...


ItemT = TypeVar("ItemT", bound=Item)
JobT = TypeVar("JobT", bound=Job)
EventT = TypeVar("EventT", bound=Answer)
EventT_co = TypeVar("EventT_co", bound=Answer, covariant=True)

CommonEvent = Opened | Preempted | SessionLost | SessionFailed | Refused
"""Event that any service may answer with instead of its own."""


@dataclass(frozen=True, slots=True)
class ExecutorOutput(Generic[EventT_co]):
    """Results of one forward."""

    results: Sequence[EventT_co | OutriderError | None]
    """Results by job: its answer, why its session fails, or None when it needs more forwards. Empty with ``batched``.
    """
    computed_ns: int
    """Time at which the model was done and sampling began, by the core's clock, which is ``time.perf_counter_ns``."""
    used_graph: bool = False
    """True if a captured forward was replayed."""
    masked_ns: tuple[int, int] | None = None
    """Readings of the core's clock between which the masks of grammars were made; None without any."""
    pushed: Sequence[tuple[int, Any]] = ()
    """Events that answer no item, each with the number of its link. They leave with the next message."""
    batched: AnswerBatch[EventT_co] | None = None
    """The answers of a step that came as arrays, if all its sessions have one."""
    plain: LookaheadOutcome | None = None
    """Next tokens of the texts of a plain step, which ``results`` do not contain."""
    postprocess: Callable[[], None] | None = None
    """Deferred work that no answer waits for, called before the sequences of ``batched`` are used again."""

    def one_by_one(self) -> ExecutorOutput[EventT_co]:
        """Output with a result for each job, and settled."""
        if self.batched is None:
            return self
        if self.postprocess is not None:
            self.postprocess()
        return replace(
            self, results=list(self.batched.events(range(len(self.batched.sessions)))), batched=None, postprocess=None
        )


class LookaheadOutcome(Protocol):
    """Next tokens of the texts of a plain step, session by session."""

    @property
    def token_ids(self) -> NDArray[np.int64]:  # [B]
        """The next tokens; -1 where there is none."""
        ...

    @property
    def masses(self) -> NDArray[np.float32]:  # [B]
        """Masses of ``SparseScores``."""
        ...

    @property
    def drawn(self) -> NDArray[np.int64]:  # [B]
        """The tokens that a forward queued behind it is over."""
        ...

    @property
    def logprobs(self) -> LogprobBatch | None:
        """Logprobs of sessions that ask for them; None if none does."""
        ...

    @property
    def errors(self) -> Mapping[int, OutriderError]:
        """Errors of the sessions that fail, by their indices."""
        ...


class InFlightForward(Protocol[EventT_co]):
    """A forward that has started."""

    def is_done(self) -> bool:
        """True if ``finish`` would return without waiting."""
        ...

    def finish(self) -> ExecutorOutput[EventT_co]:
        """Wait for the forward; called once."""
        ...


@dataclass(frozen=True, slots=True)
class QueuedForward(Generic[JobT, EventT_co]):
    """A forward over the tokens that the previous one draws, queued before that one has ended."""

    forward: InFlightForward[EventT_co]
    jobs: Sequence[JobT] = ()
    """None of a step."""
    indices: Sequence[int] = ()
    """Index of each job's session among the jobs of the forward before."""


class Executor(ABC, Generic[SequenceT, ItemT, JobT, EventT]):
    """Checks items, turns them into jobs, and computes batches of jobs."""

    @property
    def is_asynchronous(self) -> bool:
        """True if a forward runs while its thread does something else."""
        return False

    # KV pages.

    @property
    def num_pages_free(self) -> int:
        """Number of free KV pages, as ``num_pages_needed`` counts them."""
        return 0

    @property
    def num_pages_unused(self) -> int:
        """Number of free KV pages out of all, for reports: it differs for models with window pages."""
        return self.num_pages_free

    def num_pages_needed(self, job: JobT, num_tokens: int) -> int:
        """Number of free KV pages that a forward over this number of tokens of a job takes, tokens written in advance
        included.
        """
        return 0

    def fits(self, batch: Sequence[tuple[JobT, int]]) -> bool:
        """True if there are free KV pages for a forward over this many tokens of each job."""
        return sum(self.num_pages_needed(job, num_tokens) for job, num_tokens in batch) <= self.num_pages_free

    def fits_alone(self, job: JobT) -> bool:
        """True if there are KV pages for all of a job's tokens, chunk by chunk, while no other session holds any."""
        return self.num_pages_needed(job, job.num_left) <= self.num_pages_free

    # Items.

    def check(self, session: Session[SequenceT], item: ItemT) -> EventT | None:
        """An answer that needs no forward, or None; ``InvalidRequestError`` for an invalid item. Changes nothing."""
        return None

    def num_adoptable(self, session: Session[SequenceT], item: ItemT) -> int:
        """Number of leading tokens of an item without kept tokens that may come from the prefix cache."""
        return 0 if session.open.num_prompt_logprobs is not None else len(item.token_ids)

    @abstractmethod
    def begin(self, session: Session[SequenceT], item: ItemT) -> JobT:
        """Create the job of an item, after the session's sequence was truncated to the item's base.

        The sequence is longer if a prefix of the item's ``token_ids`` was cached.
        """

    # Forwards.

    @abstractmethod
    def execute(self, batch: Sequence[tuple[JobT, int]]) -> ExecutorOutput[EventT]:
        """Run one forward over these numbers of tokens of the jobs, and sample or score."""

    def start(self, batch: Sequence[tuple[JobT, int]]) -> InFlightForward[EventT]:
        """``execute`` in two halves. Sequences grow now; none may be truncated until the forward is finished."""
        return _Deferred(self, batch)

    def may_follow(self, forward: InFlightForward[EventT]) -> bool:
        """True if another batch may be started behind a forward in flight, with later tokens of the same jobs too: its
        tokens count as computed, and nothing of its results is overwritten.
        """
        return False

    def look_ahead(self, job: JobT) -> None:
        """Prepare what is done with a job's tokens when they are computed. Called while a device computes a chunk of a
        prompt, so that its end does not wait for that.
        """

    # Batches: items of many running sessions at once. An executor that takes none gets all of them one by one.

    def is_decoding(self, session: Session[SequenceT]) -> bool:
        """True if the items of a session that was answered may come as arrays, and its answers go as such."""
        return False

    def session_rows(self, sessions: Sequence[Session[SequenceT]]) -> Any:  # noqa: ANN401 - the executor's own
        """Executor's data of such sessions for every step, made while they wait; None, or it has ``selected``, which
        takes places.
        """
        return None

    @property
    def truncates_batch(self) -> bool:
        """True if ``start_step`` truncates the sequences itself."""
        return False

    def takes_batch(self, step: DecodeBatch) -> bool:
        """True if all items of a step of such sessions are valid, and there are KV pages for all. Changes nothing."""
        return False

    def plan_draft_batch(self, step: DecodeBatch) -> Any:  # noqa: ANN401 - the executor's own
        """Plan the forward of a step whose draft tokens are still to come, for ``DecodeBatch.plan``; None where that
        cannot be, or ``takes_batch`` would not take them. The next call is that of ``start_step`` with this step,
        or ``drop_plan``.
        """
        return None

    def drop_plan(self, plan: Any) -> None:  # noqa: ANN401 - the executor's own
        """Give back what a plan has taken."""
        raise NotImplementedError

    def takes_drafts(self, step: DecodeBatch) -> bool:
        """True if the draft tokens that have come for a step with a plan are valid."""
        raise NotImplementedError

    def start_step(
        self, step: LookaheadStep | DecodeBatch, batch: Sequence[tuple[JobT, int]] = ()
    ) -> InFlightForward[EventT]:
        """``start`` over a step of the running batch, with jobs beside it, of which ``results`` are. Of arrays the
        sessions' sequences were truncated to what the items keep, if that is not left to it.
        """
        raise NotImplementedError

    # Decode steps of many sessions that are computed before they are asked for. An executor that takes none gets all of
    # them one by one.

    def may_be_plain(self, session: Session[SequenceT]) -> bool:
        """True if the decode steps of a session that was answered may be in an array."""
        return False

    def amend_plain(self, sessions: Sequence[Session[SequenceT]], token_ids: Sequence[int]) -> None:
        """The tokens of a queued step are known; sequences hold something else in their places."""
        raise NotImplementedError

    # Lookahead: steps computed before they are asked for.

    reads_states: bool = False
    """True if items bring hidden states of a target."""

    def may_guess(self, session: Session[SequenceT]) -> bool:
        """True if a session's proposals may be begun on a guess of the bonus token before them."""
        return False

    def follows_verdicts(self, session: Session[SequenceT]) -> bool:
        """True if a session's next proposal is known from a target's verdict alone, and worth beginning."""
        return False

    def next_step(self, session: Session[SequenceT], answer: EventT) -> ItemT | None:
        """The plain step that follows an answer; None if the answer does not determine it, or is the session's last."""
        return None

    def queue(
        self, forward: InFlightForward[EventT], step: LookaheadStep | None = None
    ) -> QueuedForward[JobT, EventT] | None:
        """Queue a forward behind one in flight, over the tokens that this one draws: ``step``, or one more decode step
        of each of its jobs. None if that is not possible.
        """
        return None

    def resolve(
        self, queued: QueuedForward[JobT, EventT], index: int, session: Session[SequenceT], answer: EventT
    ) -> ItemT | None:
        """The item of job ``index``, now that the previous forward was answered; None: it was computed with another
        token, which is removed.
        """
        return None

    def matches(self, item: ItemT, prepared: ItemT) -> bool:
        """True if an item requests exactly what was prepared."""
        return False


@dataclass(frozen=True, slots=True)
class _Deferred(Generic[JobT, EventT]):
    """A forward that runs when it is finished."""

    executor: Executor[Any, Any, JobT, EventT]
    batch: Sequence[tuple[JobT, int]]

    def is_done(self) -> bool:
        """Always true: it waits for no device."""
        return True

    def finish(self) -> ExecutorOutput[EventT]:
        """Run the forward."""
        return self.executor.execute(self.batch)
