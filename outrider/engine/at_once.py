"""A stage without foresight as one with: nothing is foreseen, and each forward runs when it is to be finished.

Owns nothing. With it a core need not know which of the two kinds it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from outrider.engine.ledger import Session
from outrider.engine.stage import EventT, Flight, Following, ItemT, JobT, Pass, Stage, TextT


@dataclass(frozen=True, slots=True)
class AtOnce(Generic[TextT, ItemT, JobT, EventT]):
    """Implements ``outrider.engine.stage.AheadStage`` over a plain ``Stage``."""

    stage: Stage[TextT, ItemT, JobT, EventT]

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

    def check(self, session: Session[TextT], item: ItemT) -> EventT | None:
        """As the stage does."""
        return self.stage.check(session, item)

    def begin(self, session: Session[TextT], item: ItemT) -> JobT:
        """As the stage does."""
        return self.stage.begin(session, item)

    def advance(self, shares: Sequence[tuple[JobT, int]]) -> Pass[EventT]:
        """As the stage does."""
        return self.stage.advance(shares)

    def start(self, shares: Sequence[tuple[JobT, int]]) -> Flight[EventT]:
        """``advance``, when it is to be finished."""
        return _Advance(self.stage, shares)

    def foresee(self, session: Session[TextT], answer: EventT) -> ItemT | None:
        """Nothing is."""
        return None

    def follow(self, flight: Flight[EventT]) -> Following[JobT, EventT] | None:
        """Nothing can."""
        return None

    def confirm(
        self, following: Following[JobT, EventT], index: int, session: Session[TextT], answer: EventT
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
    stage: Stage[Any, Any, JobT, EventT]
    shares: Sequence[tuple[JobT, int]]

    def is_done(self) -> bool:
        """It begins when it is finished."""
        return True

    def finish(self) -> Pass[EventT]:
        """All of it."""
        return self.stage.advance(self.shares)
