"""A forward under way: whom it serves, since when, and what follows it. Owns nothing of what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from outrider.serving.executor import EventT, InFlightForward, ItemT, JobT, QueuedForward, SequenceT
from outrider.serving.scheduled_request import ScheduledRequest
from outrider.serving.token_budget import is_running


@dataclass(slots=True)
class RunningBatch(Generic[SequenceT, ItemT, JobT, EventT]):
    """A forward that was started and has not ended."""

    flight: InFlightForward[EventT]
    served: list[tuple[ScheduledRequest[SequenceT, ItemT, JobT, EventT], int]]
    """Each with its tokens in it."""
    started_ns: int
    num_running: int
    num_chunk_tokens: int
    """Of prompts."""
    following: QueuedForward[JobT, EventT] | None = None
    """One more step of those that it serves, queued behind it."""
    may_be_followed: bool = True
    """Something has happened since it was last tried to queue one."""

    @classmethod
    def of(
        cls,
        flight: InFlightForward[EventT],
        served: list[tuple[ScheduledRequest[SequenceT, ItemT, JobT, EventT], int]],
        started_ns: int,
    ) -> RunningBatch[SequenceT, ItemT, JobT, EventT]:
        """A flight that serves these, and is under way now."""
        chunks = [share for pending, share in served if not is_running(pending.job)]
        for pending, _ in served:
            pending.is_under_way = True
        return cls(flight, served, started_ns, len(served) - len(chunks), sum(chunks))

    @property
    def pendings(self) -> list[ScheduledRequest[SequenceT, ItemT, JobT, EventT]]:
        """Whom it serves."""
        return [pending for pending, _ in self.served]
