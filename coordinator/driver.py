"""Drives sessions: brings events to their state machines, and does what those ask for.

Owns the routing of events, timers, and when the next request is started. Decides nothing about tokens (``loop``), who
runs (``admission``), how a service is reached (``services``) or what a user is told (``ticket``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from coordinator import actions
from coordinator.loop import SessionLoop
from coordinator.planning import check_room
from coordinator.roster import Roster
from coordinator.services import Services
from coordinator.sides import DraftFacts
from coordinator.ticket import Ticket
from outrider.errors import OutriderError
from outrider.ports import Draft, DraftEvent, EventBatch, ForwardReport, Scores, Target, TargetEvent
from outrider.types import ModelDescription


class Driver:
    """The sessions of one coordinator on its services."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        roster: Roster,
        *,
        on_model: Callable[[ModelDescription], None],
        on_target: Callable[[bool], None],
        target_timeout_s: float,
        draft_timeout_s: float,
    ) -> None:
        """``on_target`` is told when the target is attached or lost, ``on_model`` before it is attached."""
        self._roster = roster
        self._on_target = on_target
        self._draft_timeout_s = draft_timeout_s
        self.services = Services(target, draft, self, on_model=on_model, target_timeout_s=target_timeout_s)

    # For whoever takes requests in.

    def submit(self, ticket: Ticket) -> None:
        """Take a request in; ``CapacityError`` when the queue is full."""
        self._roster.submit(ticket)
        self._admit()

    def expire_after(self, ticket: Ticket, seconds: float) -> None:
        """End the request with ``DeadlineError`` when its time is up."""
        ticket.call_later(seconds, partial(self._deliver, ticket, ticket.loop.expire))

    def cancel(self, ticket: Ticket) -> None:
        """End the request, if it is not over."""
        self._deliver(ticket, ticket.loop.cancel)

    def fail_all(self, error: OutriderError) -> None:
        """End every request with this error."""
        for ticket in self._roster.all():
            self._deliver(ticket, partial(ticket.loop.fail, error))

    # What the services say.

    def on_target_batch(self, batch: EventBatch[TargetEvent]) -> None:
        """Events of the target."""
        told: list[Ticket] = []
        for event in batch.events:
            ticket = self._roster.find(event.session)
            if ticket is not None:
                told.append(ticket)
                self._advance(ticket, partial(ticket.loop.on_target_event, event), batch.report)
                if isinstance(event, Scores) and self._roster.found_room(ticket):
                    self._admit()
        self._hand_out(told)

    def on_draft_batch(self, batch: EventBatch[DraftEvent]) -> None:
        """Events of the draft."""
        told: list[Ticket] = []
        for event in batch.events:
            ticket = self._roster.find(event.session)
            if ticket is not None:
                told.append(ticket)
                self._advance(ticket, partial(ticket.loop.on_draft_event, event), batch.report)
        self._hand_out(told)

    def target_attached(self) -> None:
        """The target is there: sessions go on, and waiting requests may start."""
        self._on_target(True)
        self._fail_what_outgrew(self.services.require_target())
        self._tell_all(SessionLoop.target_back)
        self._unblock()

    def target_lost(self) -> None:
        """The target's link is gone: sessions pause."""
        self._on_target(False)
        self._tell_all(SessionLoop.target_lost)

    def target_given_up(self, error: OutriderError) -> None:
        """The target was not back in time: no request can go on."""
        self.fail_all(error)

    def draft_attached(self) -> None:
        """The draft is there: sessions may speculate again."""
        facts = self.services.draft_facts()
        if facts is not None:
            self._tell_all(partial(_tell_draft_back, facts))

    def draft_lost(self) -> None:
        """The draft's link is gone: sessions go on without."""
        self._tell_all(SessionLoop.draft_lost)

    # Events to sessions, and what they ask for.

    def _deliver(self, ticket: Ticket, event: Callable[[], None]) -> None:
        self._advance(ticket, event)
        ticket.flush()

    def _advance(self, ticket: Ticket, event: Callable[[], None], report: ForwardReport | None = None) -> None:
        """Bring one event and do what follows; new output waits for the ticket's ``flush``."""
        ticket.deliver(event, report)
        for action in ticket.loop.take_actions():
            self._act(ticket, action)

    def _hand_out(self, tickets: Sequence[Ticket]) -> None:
        """After the commands of this turn: the services begin their next forwards while users are told of the last."""
        asyncio.get_running_loop().call_soon(_flush, tickets)

    def _tell_all(self, event: Callable[[SessionLoop], None]) -> None:
        for ticket in self._roster.all():
            self._deliver(ticket, partial(event, ticket.loop))

    def _act(self, ticket: Ticket, action: actions.Action) -> None:
        match action:
            case actions.ToDraft(command):
                if self.services.draft is not None:
                    self.services.draft.send(command)
            case actions.ToTarget(command):
                self.services.target.send(command)
            case actions.Emit():
                ticket.emit(action)
            case actions.SetDraftTimer(timer):
                ring = partial(self._deliver, ticket, partial(ticket.loop.draft_timed_out, timer))
                ticket.set_draft_timer(self._draft_timeout_s, ring)
            case actions.ClearDraftTimer():
                ticket.clear_draft_timer()
            case actions.RetryDraftAfter(retry_after_ms):
                ticket.call_later(retry_after_ms / 1000, partial(self._retry_draft, ticket))
            case actions.Park(retry_after_ms):
                self._park(ticket, retry_after_ms)
            case actions.Finish() | actions.Fail():
                self._end(ticket, action)

    def _retry_draft(self, ticket: Ticket) -> None:
        facts = self.services.draft_facts()
        if facts is not None:  # otherwise every session is told when the draft is back
            self._deliver(ticket, partial(ticket.loop.draft_back, facts))

    def _fail_what_outgrew(self, target: ModelDescription) -> None:
        """A target that came back smaller will never have room for some: they would wait for it for ever."""
        for ticket in self._roster.all():
            plan = ticket.loop.plan
            try:
                check_room(target, len(plan.prompt_token_ids), plan.max_tokens)
            except OutriderError as error:
                self._deliver(ticket, partial(ticket.loop.fail, error))

    # Who runs.

    def _admit(self) -> None:
        """Start whoever may run now."""
        if self.services.target.is_up:
            for ticket in self._roster.to_start():
                ticket.stopwatch.note_admitted()
                self._deliver(ticket, partial(ticket.loop.start, ticket.session))

    def _park(self, ticket: Ticket, retry_after_ms: int) -> None:
        """The target has no room: wait at the head of the queue until pages come free, or for a while."""
        self._roster.park(ticket)
        ticket.call_later(retry_after_ms / 1000, self._unblock)

    def _unblock(self) -> None:
        self._roster.unblock()
        self._admit()

    def _end(self, ticket: Ticket, ending: actions.Finish | actions.Fail) -> None:
        ticket.end(ending)
        self._roster.end(ticket, ending)
        # In a later turn: this may be in the middle of telling every session something.
        asyncio.get_running_loop().call_soon(self._admit)


def _flush(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.flush()


def _tell_draft_back(facts: DraftFacts, loop: SessionLoop) -> None:
    loop.draft_back(facts)
