"""Drives sessions: brings events to their state machines, and does what those ask for.

Owns the routing of events, timers, and when the next request is started. Decides nothing about tokens (``loop``), who
runs (``admission``), how a service is reached (``services``) or what a user is told (``ticket``).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from functools import partial

from coordinator import actions
from coordinator.draft_timeout import DraftTimeout
from coordinator.judging import sound_proposals, verdicts_of
from coordinator.loop import SessionLoop, Waiting
from coordinator.placement import Placement
from coordinator.planning import check_room
from coordinator.replicas import Source
from coordinator.roster import Roster
from coordinator.services import DraftReplica, Services, TargetReplica, draft_facts
from coordinator.ticket import Ticket
from coordinator.timekeeping import Stopwatch
from outrider.errors import CapacityError, OutriderError, UnavailableError
from outrider.ports import (
    DraftCommand,
    DraftEvent,
    EventBatch,
    ItemTiming,
    Proposal,
    Scores,
    TargetCommand,
    TargetEvent,
)
from outrider.telemetry.logs import about_request
from outrider.types import ModelDescription

TOLD_IN_A_TURN = 8
"""Users that are told of a step in one turn of the event loop; each takes a fraction of a tenth of a millisecond."""


class Driver:
    """The sessions of one coordinator on its services."""

    def __init__(
        self,
        targets: Source[TargetCommand, TargetEvent],
        drafts: Source[DraftCommand, DraftEvent] | None,
        roster: Roster,
        *,
        on_model: Callable[[ModelDescription], None],
        on_target: Callable[[bool], None],
        target_timeout_s: float,
        draft_timeout_s: float,
    ) -> None:
        """``on_target`` is told of the first target attached and the last lost; ``on_model`` is as for ``Services``."""
        self._roster = roster
        self._on_target = on_target
        self._draft_timeout_s, self._target_timeout_s = draft_timeout_s, target_timeout_s
        self._has_suspects = False
        """Sessions over which targets may break are running, and some may wait for their turn."""
        self._draft_timeouts: dict[DraftReplica | None, DraftTimeout] = {}
        """Of the drafts that are attached."""
        self.services = Services(targets, drafts, self, on_model=on_model, target_timeout_s=target_timeout_s)
        self._policy = roster.policy
        self._placement = Placement(self.services, self._policy)
        self._untold: dict[Ticket, None] = {}
        """Whose users are to be told of new output, in this order."""
        self._has_commands = False
        """A message came since users were last told, and the commands that follow from it go first."""

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

    def on_target_batch(self, replica: TargetReplica, batch: EventBatch[TargetEvent]) -> None:
        """Events of a target."""
        self._has_commands = True
        told: list[Ticket] = []
        verdicts = verdicts_of(batch.events, self._find_loop)
        self._policy.begin(replica, Stopwatch.now())
        for event, timing in batch.timed():
            ticket = self._roster.find(event.session)
            if ticket is not None and ticket.target is replica:
                told.append(ticket)
                if ticket.trace.notes is not None:
                    ticket.trace.notes.answered(event, timing, is_draft=False)
                self._advance(ticket, partial(ticket.hear_target, event, verdicts.get(event.session)), timing)
                if isinstance(event, Scores):
                    self._note_room(ticket)
        if self._has_suspects:
            self._send_next_suspect()
        if self._policy.end(replica, batch.report):
            # After the commands of this turn, as all that can wait.
            asyncio.get_running_loop().call_soon(self._policy.choose, replica)
        self._hand_out(told)

    def on_draft_batch(self, replica: DraftReplica, batch: EventBatch[DraftEvent]) -> None:
        """Events of a draft, of which no user has to be told."""
        self._has_commands = True
        timeout = self._draft_timeouts.get(replica)
        if timeout is not None and batch.events:
            timeout.heard(asyncio.get_running_loop().time())
        self._note_proposals(batch)
        sound = sound_proposals(batch.events, self._find_loop)
        for event, timing in batch.timed():
            ticket = self._roster.find(event.session)
            if ticket is not None and ticket.draft is replica:
                if ticket.trace.notes is not None:
                    ticket.trace.notes.answered(event, timing, is_draft=True)
                if timeout is not None and isinstance(event, Proposal):
                    timeout.note_wait(ticket.end_draft_wait())
                is_sound = event.session in sound
                self._advance(ticket, partial(ticket.hear_draft, event, is_sound=is_sound), timing)

    def _note_proposals(self, batch: EventBatch[DraftEvent]) -> None:
        """For the controller of the target that they are for."""
        ticket = self._roster.find(batch.events[0].session) if batch.events else None
        if ticket is not None:
            self._policy.note_proposals(ticket.target, batch)

    def target_attached(self, replica: TargetReplica) -> None:
        """A target is there: sessions without one go on, and waiting requests may start."""
        if len(self.services.target.attached) == 1:
            self._on_target(True)
        self._fail_what_outgrew(self.services.require_target())
        self._find_targets(self._roster.running())
        self._unblock()

    def target_lost(self, replica: TargetReplica) -> None:
        """A target's link is gone: its sessions go on elsewhere, or pause until there is one."""
        if not self.services.target.is_up:
            self._on_target(False)
        self._placement.forget_target(replica)
        orphans = [ticket for ticket in self._roster.running() if ticket.target is replica]
        for ticket in orphans:
            self._placement.leave_target(ticket)
            self._deliver(ticket, ticket.lose_target)
        self._has_suspects = self._has_suspects or any(ticket.loop.is_suspect for ticket in orphans)
        self._find_targets(orphans)
        for ticket in orphans:
            if ticket.target is None and not ticket.is_over:
                ticket.call_later(self._target_timeout_s, partial(self._give_up_on, ticket, ticket.num_moves))

    def target_given_up(self, error: OutriderError) -> None:
        """No target was back in time: no request can go on."""
        self.fail_all(error)

    def draft_attached(self, replica: DraftReplica) -> None:
        """A draft is there: sessions without one may speculate."""
        self._draft_timeouts[replica] = DraftTimeout(self._draft_timeout_s)
        self._find_drafts(self._roster.running())

    def draft_lost(self, replica: DraftReplica) -> None:
        """A draft's link is gone: its sessions go on with another, or without."""
        self._draft_timeouts.pop(replica, None)
        self._placement.forget_draft(replica)
        orphans = [ticket for ticket in self._roster.running() if ticket.draft is replica]
        for ticket in orphans:
            self._placement.leave_draft(ticket)
            self._deliver(ticket, ticket.lose_draft)
        self._find_drafts(orphans)

    # Where sessions live.

    def _find_targets(self, tickets: Iterable[Ticket]) -> None:
        for ticket in sorted(tickets, key=lambda ticket: ticket.loop.num_target_losses):
            ticket.refused_by.clear()
            if ticket.target is not None or ticket.is_over or self._waits_its_turn(ticket):
                continue
            if self._placement.place_on_target(ticket):
                self._deliver(ticket, ticket.loop.target_back)

    def _waits_its_turn(self, ticket: Ticket) -> bool:
        """Of sessions over which targets broke often in a row one is sent at a time, so that it shows which it was."""
        return ticket.loop.is_suspect and any(
            other.target is not None and other.loop.is_suspect for other in self._roster.running()
        )

    def _send_next_suspect(self) -> None:
        """After an answer or an end, which may make room for the next."""
        running = self._roster.running()
        self._has_suspects = any(ticket.loop.is_suspect for ticket in running)
        self._find_targets([ticket for ticket in running if ticket.loop.is_suspect])

    def _give_up_on(self, ticket: Ticket, num_moves: int) -> None:
        """There may be targets, and none that could hold it."""
        if self.services.target.is_up and ticket.loop.is_suspect:
            ticket.call_later(self._target_timeout_s, partial(self._give_up_on, ticket, num_moves))
        elif ticket.target is None and ticket.num_moves == num_moves and self._roster.find(ticket.session) is ticket:
            error = UnavailableError(f"no target that could hold it was back after {self._target_timeout_s:g} s")
            self._deliver(ticket, partial(ticket.loop.fail, error))

    def _find_drafts(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._find_draft(ticket)

    def _find_draft(self, ticket: Ticket, *, besides: DraftReplica | None = None) -> None:
        if ticket.draft is not None or ticket.is_over or not ticket.loop.lacks_draft:
            return
        replica = self._placement.place_on_draft(ticket, besides=besides)
        if replica is not None:
            self._deliver(ticket, partial(ticket.loop.draft_back, draft_facts(replica)))

    def _retry_draft(self, ticket: Ticket, refuser: DraftReplica | None) -> None:
        if self._roster.find(ticket.session) is ticket:  # otherwise it is given one when it starts again
            self._find_draft(ticket, besides=refuser)

    def _note_room(self, ticket: Ticket) -> None:
        ticket.refused_by.clear()
        if self._roster.found_room(ticket):
            self._admit()

    # Events to sessions, and what they ask for.

    def _deliver(self, ticket: Ticket, event: Callable[[], None]) -> None:
        self._advance(ticket, event)
        ticket.flush()

    def _advance(self, ticket: Ticket, event: Callable[[], None], timing: ItemTiming | None = None) -> None:
        """Bring one event and do what follows; new output waits for the ticket's ``flush``."""
        before = about_request.set(ticket.log_fields)
        try:
            ticket.deliver(event, timing)
            for action in ticket.loop.take_actions():
                self._act(ticket, action)
        finally:
            about_request.reset(before)

    def _find_loop(self, session: int) -> SessionLoop | None:
        ticket = self._roster.find(session)
        return None if ticket is None else ticket.loop

    def _hand_out(self, tickets: Iterable[Ticket]) -> None:
        """After the commands of this turn: the services begin their next forwards while users are told of the last."""
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold.update(dict.fromkeys(tickets))

    def _tell(self) -> None:
        """A few in each turn, so that what a service says meanwhile does not wait until all users are told."""
        if self._has_commands:
            # They are put together in this turn and written in the next.
            self._has_commands = False
            asyncio.get_running_loop().call_soon(self._tell_some)
        else:
            self._tell_some()

    def _tell_some(self) -> None:
        try:
            for ticket in tuple(itertools.islice(self._untold, TOLD_IN_A_TURN)):
                del self._untold[ticket]
                ticket.flush()
        finally:
            if self._untold:
                asyncio.get_running_loop().call_soon(self._tell)

    def _act(self, ticket: Ticket, action: actions.Action) -> None:
        match action:
            case actions.ToDraft(command):
                ticket.note_sent(command)
                if ticket.draft is not None:
                    ticket.draft.send(command)
            case actions.ToTarget(command):
                ticket.note_sent(command)
                if ticket.target is not None:
                    ticket.target.send(command)
            case actions.Emit():
                ticket.emit(action)
            case actions.SetDraftTimer(timer):
                timeout = self._draft_timeouts.get(ticket.draft)
                delay_s = self._draft_timeout_s if timeout is None else timeout.seconds
                ticket.set_draft_timer(delay_s, partial(self._time_out_draft, ticket, timer))
            case actions.ClearDraftTimer():
                ticket.clear_draft_timer()
            case actions.RetryDraftAfter(retry_after_ms):
                ticket.call_later(retry_after_ms / 1000, partial(self._retry_draft, ticket, ticket.draft))
                self._placement.leave_draft(ticket)
            case actions.Park(retry_after_ms):
                self._park(ticket, retry_after_ms)
            case actions.Finish() | actions.Fail():
                self._end(ticket, action)

    def _time_out_draft(self, ticket: Ticket, timer: int) -> None:
        timeout = self._draft_timeouts.get(ticket.draft)
        was_silent = timeout is not None and timeout.is_silent
        if timeout is not None and ticket.draft_wait_began is not None:
            timeout.passed(ticket.draft_wait_began)
        self._deliver(ticket, partial(ticket.loop.draft_timed_out, timer))
        if timeout is not None and timeout.is_silent and not was_silent:
            self._go_on_without(ticket.draft)

    def _go_on_without(self, draft: DraftReplica | None) -> None:
        """Let no other session wait for a draft that answers nobody; its answers are taken when they come."""
        for ticket in self._roster.running():
            if ticket.draft is draft and ticket.loop.waiting is Waiting.DRAFT:
                self._deliver(ticket, partial(ticket.loop.draft_timed_out, ticket.loop.step))

    def _fail_what_outgrew(self, target: ModelDescription) -> None:
        """Targets that came back smaller will never have room for some: they would wait for it for ever."""
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
                ticket.admit()
                self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        if self._placement.place_on_target(ticket):
            self._find_draft(ticket)
            self._deliver(ticket, partial(ticket.loop.start, ticket.session))
        else:
            error = CapacityError("no target that could hold this request is attached now")
            self._deliver(ticket, partial(ticket.loop.fail, error))

    def _park(self, ticket: Ticket, retry_after_ms: int) -> None:
        """The target has no room: go to another, else wait at the head of the queue for pages, or for a while."""
        if ticket.target is not None:
            ticket.refused_by.add(ticket.target)
        self._placement.leave(ticket)
        # Whichever draft it is given when it starts again has to be told all.
        self._deliver(ticket, ticket.loop.draft_lost)
        if self._placement.place_on_target(ticket):
            self._roster.renumber(ticket)
            self._find_draft(ticket)
            self._deliver(ticket, partial(ticket.loop.start, ticket.session))
            return
        ticket.refused_by.clear()
        ticket.stopwatch.note_parked()
        self._roster.park(ticket)
        ticket.call_later(retry_after_ms / 1000, self._unblock)

    def _unblock(self) -> None:
        self._roster.unblock()
        self._admit()

    def _end(self, ticket: Ticket, ending: actions.Finish | actions.Fail) -> None:
        self._placement.leave(ticket)
        ticket.end(ending)
        self._roster.end(ticket, ending)
        # In a later turn: this may be in the middle of telling every session something.
        asyncio.get_running_loop().call_soon(self._admit)
        if self._has_suspects:
            asyncio.get_running_loop().call_soon(self._send_next_suspect)
