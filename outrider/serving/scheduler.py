"""One forward: chosen, started and ended.

Owns what is under way, who is served by it, and what is learnt of the time that forwards take. Refuses to know where
items come from, which of them were foreseen, and what is made of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from outrider.errors import OutriderError
from outrider.recording import PassRecord
from outrider.serving.executor import AsyncExecutor, EventT, ExecutorOutput, ItemT, JobT, SequenceT
from outrider.serving.prefill_chunk_size import PrefillChunkSize
from outrider.serving.prefill_delay import LONGEST_ABSENCE_NS, PrefillDelayPolicy
from outrider.serving.request_queue import RequestQueue
from outrider.serving.running_batch import RunningBatch
from outrider.serving.scheduled_request import ScheduledRequest
from outrider.serving.stats import ServiceStats
from outrider.serving.token_budget import is_running, share_tokens


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How many tokens a forward may have."""

    max_tokens: int
    max_prefill_beside: int
    """Of prompts, beside running sessions."""
    adapts_chunks: bool
    """Fewer where forwards say that running sessions would wait too long."""


@dataclass(frozen=True, slots=True)
class FinishedBatch(Generic[SequenceT, ItemT, JobT, EventT]):
    """A forward that has ended."""

    started: RunningBatch[SequenceT, ItemT, JobT, EventT]
    results: Sequence[EventT | OutriderError | None]
    """Of each that it served, as in ``ExecutorOutput``."""
    ended_ns: int


class Scheduler(Generic[SequenceT, ItemT, JobT, EventT]):
    """Those of one device, one after the other."""

    def __init__(
        self,
        stage: AsyncExecutor[SequenceT, ItemT, JobT, EventT],
        request_queue: RequestQueue[SequenceT, ItemT, JobT, EventT],
        prefill_delay: PrefillDelayPolicy,
        budget: TokenBudget,
        *,
        fit: Callable[
            [list[tuple[ScheduledRequest[SequenceT, ItemT, JobT, EventT], int]]],
            list[tuple[ScheduledRequest[SequenceT, ItemT, JobT, EventT], int]],
        ],
        activity: ServiceStats,
        clock: Callable[[], int],
    ) -> None:
        """``fit`` says what of a forward there are KV pages for."""
        self._fit = fit
        self.under_way: RunningBatch[SequenceT, ItemT, JobT, EventT] | None = None
        self._stage, self._request_queue, self._prefill_delay = stage, request_queue, prefill_delay
        self._activity, self._clock, self._budget = activity, clock, budget
        self._prefill_chunk_size = PrefillChunkSize(budget.max_prefill_beside)
        self._ran_ns = -LONGEST_ABSENCE_NS
        """When a running session was served last."""

    @property
    def go_on_alone(self) -> bool:
        """Whether a forward, once started, needs no step until it has ended."""
        return self._stage.is_asynchronous

    def start(self) -> None:
        """Begin the next one, if anything is due."""
        started_ns = self._clock()
        served = self._fit(self._choose(started_ns))
        if served:
            flight = self._stage.start([(pending.job, share) for pending, share in served])
            self.under_way = RunningBatch.of(flight, served, started_ns)

    def end(
        self, started: RunningBatch[SequenceT, ItemT, JobT, EventT]
    ) -> FinishedBatch[SequenceT, ItemT, JobT, EventT]:
        """The one under way, to its end; nothing is under way then."""
        self.under_way = None
        outcome = started.flight.finish()
        ended_ns = self._clock()
        self._note_duration(started, ended_ns)
        self._note_pass(started, outcome, ended_ns)
        return FinishedBatch(started, outcome.results, ended_ns)

    def _choose(self, now_ns: int) -> list[tuple[ScheduledRequest[SequenceT, ItemT, JobT, EventT], int]]:
        due = sorted(
            self._request_queue.due, key=lambda pending: pending.foreseen is not None
        )  # who has asked comes first
        shares = share_tokens(
            [pending.job for pending in due],
            self._budget.max_tokens,
            max_beside=self._prefill_chunk_size.tokens,
            is_beside=now_ns - self._ran_ns < LONGEST_ABSENCE_NS,
        )
        return [(pending, share) for pending, share in zip(due, shares, strict=True) if share]

    def _note_duration(self, started: RunningBatch[SequenceT, ItemT, JobT, EventT], ended_ns: int) -> None:
        duration_ns = ended_ns - started.started_ns
        if started.num_running:
            self._ran_ns = ended_ns
            if self._budget.adapts_chunks:
                self._prefill_chunk_size.note_forward(duration_ns, started.num_chunk_tokens)
        if started.num_chunk_tokens:
            self._prefill_delay.note_chunk(duration_ns)
        elif all(is_running(pending.job) for pending in self._request_queue.due):
            self._prefill_chunk_size.note_end_of_prompts()

    def _note_pass(
        self, started: RunningBatch[SequenceT, ItemT, JobT, EventT], outcome: ExecutorOutput[EventT], ended_ns: int
    ) -> None:
        num_tokens = sum(share for _, share in started.served)
        found = PassRecord(
            started.started_ns, outcome.computed_ns, ended_ns, len(started.served), num_tokens, outcome.used_graph
        )
        waits_ns = []
        for pending in started.pendings:
            pending.is_under_way = False
            is_first = pending.queue_ns is None and pending.foreseen is None
            pending.note_pass(found)
            if is_first:
                waits_ns.append(pending.queue_ns or 0)
        self._activity.note_forward(found, waits_ns)
