"""Forwards under way: whom they serve, and since when. Owns nothing of what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from outrider.engine.ledger import SessionKey
from outrider.engine.pending import Pending
from outrider.engine.scheduling import is_running
from outrider.engine.stage import EventT, Flight, ItemT, JobT, Pass, Stage, TextT


@dataclass(frozen=True, slots=True)
class Started(Generic[TextT, ItemT, JobT, EventT]):
    """A forward under way."""

    flight: Flight[EventT]
    served: list[tuple[Pending[TextT, ItemT, JobT], int]]
    """Each with its tokens in it."""
    keys: frozenset[SessionKey]
    started_ns: int
    num_running: int
    num_chunk_tokens: int
    """Of prompts."""

    @classmethod
    def of(
        cls, flight: Flight[EventT], served: list[tuple[Pending[TextT, ItemT, JobT], int]], started_ns: int
    ) -> Started[TextT, ItemT, JobT, EventT]:
        """A flight that serves these; their jobs have not been told of it yet."""
        chunks = [share for pending, share in served if not is_running(pending.job)]
        keys = frozenset(pending.session.key for pending, _ in served)
        return cls(flight, served, keys, started_ns, len(served) - len(chunks), sum(chunks))


@dataclass(frozen=True, slots=True)
class AtOnce(Generic[JobT, EventT]):
    """A forward of a stage that does not start one and finish it later."""

    stage: Stage[Any, Any, JobT, EventT]
    shares: list[tuple[JobT, int]]

    def is_done(self) -> bool:
        """It begins when it is finished."""
        return True

    def finish(self) -> Pass[EventT]:
        """All of it."""
        return self.stage.advance(self.shares)
