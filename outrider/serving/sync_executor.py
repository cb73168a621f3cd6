"""A stage without foresight as one with: nothing is foreseen, and each forward runs when it is to be finished.

Owns nothing. With it a core need not know which of the two kinds it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from outrider.serving.executor import (
    EventT,
    Executor,
    ExecutorOutput,
    InFlightForward,
    ItemT,
    JobT,
    QueuedForward,
    SequenceT,
)
from outrider.serving.session_table import Session


@dataclass(frozen=True, slots=True)
class SyncExecutorAdapter(Generic[SequenceT, ItemT, JobT, EventT]):
    """Implements ``outrider.serving.executor.AsyncExecutor`` over a plain ``Executor``."""

    stage: Executor[SequenceT, ItemT, JobT, EventT]

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return self.stage.num_pages_free

    @property
    def is_asynchronous(self) -> bool:
        """A forward needs the thread that started it."""
        return False

    def num_pages_needed(self, job: JobT, share: int) -> int:
        """As the stage does."""
        return self.stage.num_pages_needed(job, share)

    def check(self, session: Session[SequenceT], item: ItemT) -> EventT | None:
        """As the stage does."""
        return self.stage.check(session, item)

    def begin(self, session: Session[SequenceT], item: ItemT) -> JobT:
        """As the stage does."""
        return self.stage.begin(session, item)

    def advance(self, shares: Sequence[tuple[JobT, int]]) -> ExecutorOutput[EventT]:
        """As the stage does."""
        return self.stage.advance(shares)

    def start(self, shares: Sequence[tuple[JobT, int]]) -> InFlightForward[EventT]:
        """``advance``, when it is to be finished."""
        return _Advance(self.stage, shares)

    def foresee(self, session: Session[SequenceT], answer: EventT) -> ItemT | None:
        """Nothing is."""
        return None

    def follow(self, flight: InFlightForward[EventT]) -> QueuedForward[JobT, EventT] | None:
        """Nothing can."""
        return None

    def confirm(
        self, following: QueuedForward[JobT, EventT], index: int, session: Session[SequenceT], answer: EventT
    ) -> ItemT | None:
        """Nothing has followed."""
        return None

    def is_foreseen(self, item: ItemT, foreseen: ItemT) -> bool:
        """Nothing was."""
        return False

    def answer_to(self, item: ItemT, answer: EventT) -> EventT:
        """What was answered to an item that was asked."""
        return answer


@dataclass(frozen=True, slots=True)
class _Advance(Generic[JobT, EventT]):
    stage: Executor[Any, Any, JobT, EventT]
    shares: Sequence[tuple[JobT, int]]

    def is_done(self) -> bool:
        """It begins when it is finished."""
        return True

    def finish(self) -> ExecutorOutput[EventT]:
        """All of it."""
        return self.stage.advance(self.shares)
