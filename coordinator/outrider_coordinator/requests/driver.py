"""Drives sessions: brings events to their state machines, and does what those ask for.

Owns the routing of events, timers, and when the next request is started. Decides nothing about tokens (``loop``), who
runs (``admission``), how a service is reached (``services``) or what a user is told (``request_state``).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from functools import partial

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
from outrider_coordinator.acceptance.batch import sound_proposals, verdicts_of
from outrider_coordinator.requests.input_processor import check_room
from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.placement import Placement
from outrider_coordinator.routing.replicas import Source
from outrider_coordinator.routing.services import DraftReplica, Services, TargetReplica, draft_facts
from outrider_coordinator.session import actions
from outrider_coordinator.session.draft_timeout import DraftTimeout
from outrider_coordinator.session.loop import SessionLoop, Waiting
from outrider_coordinator.stats.request_timings import RequestTimings

TOLD_IN_A_TURN = 8
"""Users that are told of a step in one turn of the event loop; each takes a fraction of a tenth of a millisecond."""


class Driver:
    """The sessions of one coordinator on its services."""

    def __init__(
        self,
        targets: Source[TargetCommand, TargetEvent],
        drafts: Source[DraftCommand, DraftEvent] | None,
        request_manager: RequestManager,
        *,
        on_model: Callable[[ModelDescription], None],
        on_target: Callable[[bool], None],
        target_timeout_s: float,
        draft_timeout_s: float,
    ) -> None:
        """``on_target`` is told of the first target attached and the last lost; ``on_model`` is as for ``Services``."""
        self._request_manager = request_manager
        self._on_target = on_target
        self._draft_timeout_s, self._target_timeout_s = draft_timeout_s, target_timeout_s
        self._has_suspects = False
        """Sessions over which targets may break are running, and some may wait for their turn."""
        self._draft_timeouts: dict[DraftReplica | None, DraftTimeout] = {}
        """Of the drafts that are attached."""
        self.services = Services(targets, drafts, self, on_model=on_model, target_timeout_s=target_timeout_s)
        self._policy = request_manager.policy
        self._placement = Placement(self.services, self._policy)
        self._untold: dict[RequestState, None] = {}
        """Whose users are to be told of new output, in this order."""
        self._has_commands = False
        """A message came since users were last told, and the commands that follow from it go first."""

    # For whoever takes requests in.

    def submit(self, request_state: RequestState) -> None:
        """Take a request in; ``CapacityError`` when the queue is full."""
        self._request_manager.submit(request_state)
        self._admit()

    def expire_after(self, request_state: RequestState, seconds: float) -> None:
        """End the request with ``DeadlineError`` when its time is up."""
        request_state.call_later(seconds, partial(self._deliver, request_state, request_state.loop.expire))

    def cancel(self, request_state: RequestState) -> None:
        """End the request, if it is not over."""
        self._deliver(request_state, request_state.loop.cancel)

    def fail_all(self, error: OutriderError) -> None:
        """End every request with this error."""
        for request_state in self._request_manager.all():
            self._deliver(request_state, partial(request_state.loop.fail, error))

    # What the services say.

    def on_target_batch(self, replica: TargetReplica, batch: EventBatch[TargetEvent]) -> None:
        """Events of a target."""
        self._has_commands = True
        told: list[RequestState] = []
        verdicts = verdicts_of(batch.events, self._find_loop)
        self._policy.begin(replica, RequestTimings.now())
        for event, timing in batch.timed():
            request_state = self._request_manager.find(event.session)
            if request_state is not None and request_state.target is replica:
                told.append(request_state)
                if request_state.trace.notes is not None:
                    request_state.trace.notes.answered(event, timing, is_draft=False)
                self._advance(
                    request_state, partial(request_state.hear_target, event, verdicts.get(event.session)), timing
                )
                if isinstance(event, Scores):
                    self._note_room(request_state)
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
            request_state = self._request_manager.find(event.session)
            if request_state is not None and request_state.draft is replica:
                if request_state.trace.notes is not None:
                    request_state.trace.notes.answered(event, timing, is_draft=True)
                if timeout is not None and isinstance(event, Proposal):
                    timeout.note_wait(request_state.end_draft_wait())
                is_sound = event.session in sound
                self._advance(request_state, partial(request_state.hear_draft, event, is_sound=is_sound), timing)

    def _note_proposals(self, batch: EventBatch[DraftEvent]) -> None:
        """For the controller of the target that they are for."""
        request_state = self._request_manager.find(batch.events[0].session) if batch.events else None
        if request_state is not None:
            self._policy.note_proposals(request_state.target, batch)

    def target_attached(self, replica: TargetReplica) -> None:
        """A target is there: sessions without one go on, and waiting requests may start."""
        num_targets = len(self.services.target.attached)
        self._request_manager.set_num_targets(num_targets)
        if num_targets == 1:
            self._on_target(True)
        self._fail_what_outgrew(self.services.require_target())
        self._find_targets(self._request_manager.running())
        self._unblock()

    def target_lost(self, replica: TargetReplica) -> None:
        """A target's link is gone: its sessions go on elsewhere, or pause until there is one."""
        self._request_manager.set_num_targets(len(self.services.target.attached))
        if not self.services.target.is_up:
            self._on_target(False)
        self._placement.forget_target(replica)
        orphans = [
            request_state for request_state in self._request_manager.running() if request_state.target is replica
        ]
        for request_state in orphans:
            self._placement.leave_target(request_state)
            self._deliver(request_state, request_state.lose_target)
        self._has_suspects = self._has_suspects or any(request_state.loop.is_suspect for request_state in orphans)
        self._find_targets(orphans)
        for request_state in orphans:
            if request_state.target is None and not request_state.is_over:
                request_state.call_later(
                    self._target_timeout_s, partial(self._give_up_on, request_state, request_state.num_moves)
                )

    def target_given_up(self, error: OutriderError) -> None:
        """No target was back in time: no request can go on."""
        self.fail_all(error)

    def draft_attached(self, replica: DraftReplica) -> None:
        """A draft is there: sessions without one may speculate."""
        self._draft_timeouts[replica] = DraftTimeout(self._draft_timeout_s)
        self._find_drafts(self._request_manager.running())

    def draft_lost(self, replica: DraftReplica) -> None:
        """A draft's link is gone: its sessions go on with another, or without."""
        self._draft_timeouts.pop(replica, None)
        self._placement.forget_draft(replica)
        orphans = [request_state for request_state in self._request_manager.running() if request_state.draft is replica]
        for request_state in orphans:
            self._placement.leave_draft(request_state)
            self._deliver(request_state, request_state.lose_draft)
        self._find_drafts(orphans)

    # Where sessions live.

    def _find_targets(self, request_states: Iterable[RequestState]) -> None:
        for request_state in sorted(request_states, key=lambda request_state: request_state.loop.num_target_losses):
            request_state.refused_by.clear()
            if request_state.target is not None or request_state.is_over or self._waits_its_turn(request_state):
                continue
            if self._placement.place_on_target(request_state):
                self._deliver(request_state, request_state.loop.target_back)

    def _waits_its_turn(self, request_state: RequestState) -> bool:
        """Of sessions over which targets broke often in a row one is sent at a time, so that it shows which it was."""
        return request_state.loop.is_suspect and any(
            other.target is not None and other.loop.is_suspect for other in self._request_manager.running()
        )

    def _send_next_suspect(self) -> None:
        """After an answer or an end, which may make room for the next."""
        running = self._request_manager.running()
        self._has_suspects = any(request_state.loop.is_suspect for request_state in running)
        self._find_targets([request_state for request_state in running if request_state.loop.is_suspect])

    def _give_up_on(self, request_state: RequestState, num_moves: int) -> None:
        """There may be targets, and none that could hold it."""
        if self.services.target.is_up and request_state.loop.is_suspect:
            request_state.call_later(self._target_timeout_s, partial(self._give_up_on, request_state, num_moves))
        elif (
            request_state.target is None
            and request_state.num_moves == num_moves
            and self._request_manager.find(request_state.session) is request_state
        ):
            error = UnavailableError(f"no target that could hold it was back after {self._target_timeout_s:g} s")
            self._deliver(request_state, partial(request_state.loop.fail, error))

    def _find_drafts(self, request_states: Iterable[RequestState]) -> None:
        for request_state in request_states:
            self._find_draft(request_state)

    def _find_draft(self, request_state: RequestState, *, besides: DraftReplica | None = None) -> None:
        if request_state.draft is not None or request_state.is_over or not request_state.loop.lacks_draft:
            return
        replica = self._placement.place_on_draft(request_state, besides=besides)
        if replica is not None:
            self._deliver(request_state, partial(request_state.loop.draft_back, draft_facts(replica)))

    def _retry_draft(self, request_state: RequestState, refuser: DraftReplica | None) -> None:
        if (
            self._request_manager.find(request_state.session) is request_state
        ):  # otherwise it is given one when it starts again
            self._find_draft(request_state, besides=refuser)

    def _note_room(self, request_state: RequestState) -> None:
        request_state.refused_by.clear()
        if self._request_manager.found_room(request_state):
            self._admit()

    # Events to sessions, and what they ask for.

    def _deliver(self, request_state: RequestState, event: Callable[[], None]) -> None:
        self._advance(request_state, event)
        request_state.flush()

    def _advance(
        self, request_state: RequestState, event: Callable[[], None], timing: ItemTiming | None = None
    ) -> None:
        """Bring one event and do what follows; new output waits for the ticket's ``flush``."""
        before = about_request.set(request_state.log_fields)
        try:
            request_state.deliver(event, timing)
            for action in request_state.loop.take_actions():
                self._act(request_state, action)
        finally:
            about_request.reset(before)

    def _find_loop(self, session: int) -> SessionLoop | None:
        request_state = self._request_manager.find(session)
        return None if request_state is None else request_state.loop

    def _hand_out(self, request_states: Iterable[RequestState]) -> None:
        """After the commands of this turn: the services begin their next forwards while users are told of the last."""
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold.update(dict.fromkeys(request_states))

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
            for request_state in tuple(itertools.islice(self._untold, TOLD_IN_A_TURN)):
                del self._untold[request_state]
                request_state.flush()
        finally:
            if self._untold:
                asyncio.get_running_loop().call_soon(self._tell)

    def _act(self, request_state: RequestState, action: actions.Action) -> None:
        match action:
            case actions.ToDraft(command):
                request_state.note_sent(command)
                if request_state.draft is not None:
                    request_state.draft.send(command)
            case actions.ToTarget(command):
                request_state.note_sent(command)
                if request_state.target is not None:
                    request_state.target.send(command)
            case actions.Emit():
                request_state.emit(action)
            case actions.SetDraftTimer(timer):
                timeout = self._draft_timeouts.get(request_state.draft)
                delay_s = self._draft_timeout_s if timeout is None else timeout.seconds
                request_state.set_draft_timer(delay_s, partial(self._time_out_draft, request_state, timer))
            case actions.ClearDraftTimer():
                request_state.clear_draft_timer()
            case actions.RetryDraftAfter(retry_after_ms):
                request_state.call_later(
                    retry_after_ms / 1000, partial(self._retry_draft, request_state, request_state.draft)
                )
                self._placement.leave_draft(request_state)
            case actions.Park(retry_after_ms):
                self._park(request_state, retry_after_ms)
            case actions.Finish() | actions.Fail():
                self._end(request_state, action)

    def _time_out_draft(self, request_state: RequestState, timer: int) -> None:
        timeout = self._draft_timeouts.get(request_state.draft)
        was_silent = timeout is not None and timeout.is_silent
        if timeout is not None and request_state.draft_wait_began is not None:
            timeout.passed(request_state.draft_wait_began)
        self._deliver(request_state, partial(request_state.loop.draft_timed_out, timer))
        if timeout is not None and timeout.is_silent and not was_silent:
            self._go_on_without(request_state.draft)

    def _go_on_without(self, draft: DraftReplica | None) -> None:
        """Let no other session wait for a draft that answers nobody; its answers are taken when they come."""
        for request_state in self._request_manager.running():
            if request_state.draft is draft and request_state.loop.waiting is Waiting.DRAFT:
                self._deliver(request_state, partial(request_state.loop.draft_timed_out, request_state.loop.step))

    def _fail_what_outgrew(self, target: ModelDescription) -> None:
        """Targets that came back smaller will never have room for some: they would wait for it for ever."""
        for request_state in self._request_manager.all():
            plan = request_state.loop.plan
            try:
                check_room(target, len(plan.prompt_token_ids), plan.max_tokens)
            except OutriderError as error:
                self._deliver(request_state, partial(request_state.loop.fail, error))

    # Who runs.

    def _admit(self) -> None:
        """Start whoever may run now."""
        if self.services.target.is_up:
            for request_state in self._request_manager.to_start():
                request_state.admit()
                self._start(request_state)

    def _start(self, request_state: RequestState) -> None:
        if self._placement.place_on_target(request_state):
            self._find_draft(request_state)
            self._deliver(request_state, partial(request_state.loop.start, request_state.session))
        else:
            error = CapacityError("no target that could hold this request is attached now")
            self._deliver(request_state, partial(request_state.loop.fail, error))

    def _park(self, request_state: RequestState, retry_after_ms: int) -> None:
        """The target has no room: go to another, else wait at the head of the queue for pages, or for a while."""
        if request_state.target is not None:
            request_state.refused_by.add(request_state.target)
        self._placement.leave(request_state)
        # Whichever draft it is given when it starts again has to be told all.
        self._deliver(request_state, request_state.loop.draft_lost)
        if self._placement.place_on_target(request_state):
            self._request_manager.renumber(request_state)
            self._find_draft(request_state)
            self._deliver(request_state, partial(request_state.loop.start, request_state.session))
            return
        request_state.refused_by.clear()
        request_state.request_timings.note_parked()
        self._request_manager.park(request_state)
        request_state.call_later(retry_after_ms / 1000, self._unblock)

    def _unblock(self) -> None:
        self._request_manager.unblock()
        self._admit()

    def _end(self, request_state: RequestState, ending: actions.Finish | actions.Fail) -> None:
        self._placement.leave(request_state)
        request_state.end(ending)
        self._request_manager.end(request_state, ending)
        # In a later turn: this may be in the middle of telling every session something.
        asyncio.get_running_loop().call_soon(self._admit)
        if self._has_suspects:
            asyncio.get_running_loop().call_soon(self._send_next_suspect)
