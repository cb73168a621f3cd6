"""All requests of a coordinator: who waits, who runs under which session number, and how those that ended did.

Owns the numbers, the load that the draft length policy sees, and the counts. Sends nothing and starts nothing itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.actions import Fail, Finish
from coordinator.admission import Admission
from coordinator.speculation import DraftLengthPolicy
from coordinator.tally import Tally
from coordinator.ticket import Ticket
from outrider.errors import (
    CapacityError,
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    LostTooOftenError,
    NonFiniteLogitsError,
    ProtocolError,
    UnavailableError,
)
from outrider.types import FinishReason

_USUAL = (
    CapacityError, DeadlineError, IntegrityError, InvalidRequestError, LostTooOftenError,
    NonFiniteLogitsError, ProtocolError, UnavailableError,
)  # fmt: skip
USUAL_FAILURES = tuple(error.__name__ for error in _USUAL)


@dataclass(slots=True)
class Endings:
    """How requests ended, and what speculation did for them."""

    num_finished: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_refused: int = 0
    """Turned away since the queue was full."""
    num_prompt_tokens: int = 0
    """Of all that were taken in."""
    num_resumed: int = 0
    """Taken in with output of an interrupted call."""
    by_reason: Counter[FinishReason] = field(default_factory=Counter)
    """Those that finished or were cancelled."""
    by_error: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(USUAL_FAILURES, 0)))
    """Those that failed, by the error's name; the usual ones from the start, for whoever watches them rise."""
    tally: Tally = field(default_factory=Tally)


class Roster:
    """The requests taken in and not over yet."""

    def __init__(self, policy: DraftLengthPolicy, *, max_running: int, max_queue: int) -> None:
        self.endings = Endings()
        self.policy = policy
        self._admission: Admission[Ticket] = Admission(max_running=max_running, max_queue=max_queue)
        self._by_session: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return self._admission.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._admission.num_waiting

    def all(self) -> tuple[Ticket, ...]:
        """Those that run and those that wait."""
        return (*self._admission.running, *self._admission.waiting)

    def running(self) -> tuple[Ticket, ...]:
        """Those that run."""
        return self._admission.running

    def find(self, session: int) -> Ticket | None:
        """The request that runs under this number."""
        return self._by_session.get(session)

    def submit(self, ticket: Ticket) -> None:
        """Take a request in; ``CapacityError`` when the queue is full."""
        try:
            self._admission.submit(ticket)
        except CapacityError:
            self.endings.num_refused += 1
            raise
        self.endings.num_prompt_tokens += len(ticket.loop.plan.prompt_token_ids)
        self.endings.num_resumed += bool(ticket.loop.plan.emitted_token_ids)
        self._note_load()

    def to_start(self) -> Iterator[Ticket]:
        """Those that may run now, one after the other, each under a number of its own."""
        while (ticket := self._admission.next()) is not None:
            self.renumber(ticket)
            yield ticket

    def renumber(self, ticket: Ticket) -> None:
        """Another number, never used on any link, for one that starts, or starts elsewhere."""
        self._by_session.pop(ticket.session, None)
        ticket.session = next(self._numbers)
        self._by_session[ticket.session] = ticket

    def park(self, ticket: Ticket) -> None:
        """The target has no room for it: back to its place in the queue, which stands still until ``unblock``."""
        self._by_session.pop(ticket.session, None)
        self._admission.put_back(ticket)

    def found_room(self, ticket: Ticket) -> bool:
        """The target has room for it; whether others waited to know."""
        return self._admission.found_room(ticket)

    def unblock(self) -> None:
        """The target may have room again."""
        self._admission.unblock()

    def end(self, ticket: Ticket, ending: Finish | Fail) -> None:
        """A request is over."""
        self._by_session.pop(ticket.session, None)
        self._admission.leave(ticket)
        self._note_load()
        self._count(ticket, ending)

    def _note_load(self) -> None:
        self.policy.set_load(self.num_running + self.num_waiting)

    def tally(self) -> Tally:
        """What speculation did for all requests so far, those that still run included."""
        whole = Tally()
        for tally in (self.endings.tally, *(ticket.loop.tally for ticket in self.all())):
            whole.add(tally)
        return whole

    def _count(self, ticket: Ticket, ending: Finish | Fail) -> None:
        endings = self.endings
        endings.tally.add(ticket.loop.tally)
        if isinstance(ending, Fail):
            endings.num_failed += 1
            endings.by_error[type(ending.error).__name__] += 1
            return
        endings.by_reason[ending.reason] += 1
        if ending.reason is FinishReason.CANCELLED:
            endings.num_cancelled += 1
        else:
            endings.num_finished += 1
