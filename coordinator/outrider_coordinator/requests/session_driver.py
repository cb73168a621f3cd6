"""Session driver: passes events to sessions and carries out their actions.

A message goes: link -> ``on_target_batch`` -> ``BatchDriver`` or session -> commands -> link. All else waits in the
output scheduler until the commands have left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.errors import IntegrityError, OutriderError
from outrider.ports import (
    DraftEvent,
    EventBatch,
    ItemTiming,
    Proposal,
    Scores,
    TargetEvent,
)
from outrider.telemetry.logs import records_about
from outrider_coordinator.requests.action_carrier import ActionCarrier
from outrider_coordinator.requests.batch_driver import BatchDriver
from outrider_coordinator.requests.draft_waits import DraftWaits
from outrider_coordinator.requests.message_allowance import MessageAllowance
from outrider_coordinator.requests.output_scheduler import OutputScheduler
from outrider_coordinator.requests.request_log import log_trouble
from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.requests.taken_answers import in_batch
from outrider_coordinator.routing.peers import Peers
from outrider_coordinator.routing.services import DraftReplica, TargetReplica
from outrider_coordinator.session.target_events import is_stale_loss
from outrider_coordinator.stats.request_timings import RequestTimings

if TYPE_CHECKING:
    from outrider_coordinator.requests.driver import Driver

_log = logging.getLogger(__name__)
_now = RequestTimings.now
_TURNS_TO_SEND = 3
"""Turns of the event loop after which the commands of this turn are written: they are put together in the next one and
taken by the stream in the one after.
"""


class SessionDriver:
    """Driver of the running sessions of one coordinator."""

    def __init__(
        self,
        request_manager: RequestManager,
        draft_timeout_s: float,
        lifecycle: Driver,
        peers: Peers,
        *,
        max_messages_per_s: int = 0,
    ) -> None:
        """``max_messages_per_s``: to users; 0: any number."""
        self.draft_waits = DraftWaits(draft_timeout_s, running=request_manager.running, time_out=self._time_out_draft)
        self._find = request_manager.find
        self._policy = request_manager.policy
        self._lifecycle = lifecycle
        self._actions = ActionCarrier(lifecycle, self.draft_waits, peers)
        self._output = OutputScheduler(MessageAllowance(max_messages_per_s))
        self._scored: list[RequestState] = []
        """Requests with scores that came one by one since then: their targets have room for them."""
        self._proposed: list[EventBatch[DraftEvent]] = []
        """Messages of drafts since then."""
        self._batches = BatchDriver(
            request_manager.table,
            request_manager.policy,
            self.draft_waits,
            peers,
            find=request_manager.find,
            act_on=lambda request: self._actions.carry_out(request, _now()),
            fail=self._end_with,
        )

    def on_target_batch(self, replica: TargetReplica, batch: EventBatch[TargetEvent]) -> None:
        """Judge all scores of a message, and send the commands that follow."""
        self._output.commands_first()
        self._post_process()
        if (rest := self._batches.hold_early(replica, in_batch(batch))) is None:
            return
        batch = rest
        handled = _now()
        self._policy.begin(replica, handled)
        left = self._batches.take_scores(replica, batch, handled)
        if left.events:
            self._process_target_events(replica, left)
        self._lifecycle.answered()
        is_learning = self._policy.end(replica, batch.report)
        call_after_commands(partial(self._after_commands, replica if is_learning else None))

    def _received(
        self, replica: TargetReplica | DraftReplica, batch: EventBatch[Any]
    ) -> list[tuple[RequestState, Any, ItemTiming | None]]:
        """Events of a message whose sessions are at the replica. What has waited is done first where a session is named
        again in the message: then the rest is late.
        """
        if self._batches.has_taken(batch.events):
            self._post_process()
        found = [(self._find(event.session), event, timing) for event, timing in batch.timed()]
        return [(request, event, timing) for request, event, timing in found if request and _is_at(replica, request)]

    def _process_target_events(self, replica: TargetReplica, batch: EventBatch[TargetEvent]) -> None:
        received, handled = self._received(replica, batch), _now()
        for request, event, timing in received:
            if request.session != event.session or not _is_at(replica, request):
                continue  # it has moved since, by an event before this one
            if isinstance(event, Scores):
                handled = self._on_event(request, event, timing, handled, is_draft=False)
                self._scored.append(request)
            else:
                self._find_rooms()  # not once the target has preempted or refused
                with records_about(request.log_fields):
                    if not is_stale_loss(request.loop, event):
                        log_trouble("target", event)
                    handled = self._on_event(request, event, timing, handled, is_draft=False)
        # At once: steps are counted before a reader that was behind reads on.
        self._output.put([request for request, _, _ in received])

    def _after_commands(self, learning: TargetReplica | None = None) -> None:
        self._post_process()
        if learning is not None:
            self._policy.choose(learning)

    def _post_process(self) -> None:
        """Do what has waited for the commands to leave."""
        proposed, self._proposed = self._proposed, []
        for batch in proposed:
            if (first := self._first_of(batch)) is not None:
                self._policy.note_proposals(first.place.target, batch)
        self._find_rooms()
        ended = self._batches.post_process()
        for request in ended:
            if not request.is_over:
                self._lifecycle.found_capacity(request)
        self._output.put(ended)

    def _find_rooms(self) -> None:
        """Tell of requests with scores that their targets have room for them."""
        scored, self._scored = self._scored, []
        for request in scored:
            self._lifecycle.found_capacity(request)

    def on_draft_batch(self, replica: DraftReplica, batch: EventBatch[DraftEvent]) -> None:
        """Check all proposals of a message, and send each to its target."""
        self._output.commands_first()
        self._post_process()
        batch = in_batch(batch)
        left = self._batches.take_proposals(replica, batch, _now())
        if left.events:
            self._process_draft_events(replica, left)
        self._proposed.append(batch)
        call_after_commands(self._after_commands)
        self._take_early()

    def draft_lost(self, replica: DraftReplica) -> None:
        """The sessions of a draft have moved: what waits for its proposals waits no more."""
        self._batches.draft_lost(replica)
        self._take_early()

    def _take_early(self) -> None:
        for target, scores in self._batches.take_early():
            try:
                self.on_target_batch(target, scores)
            except Exception:  # otherwise it would end the link of the draft, which is read now
                _log.exception("held scores of the target at %s could not be judged", target)
                target.end_link()

    def _process_draft_events(self, replica: DraftReplica, batch: EventBatch[DraftEvent]) -> None:
        received = self._received(replica, batch)
        self.draft_waits.note_response(replica, (found for found, event, _ in received if isinstance(event, Proposal)))
        handled = _now()
        for request, event, timing in received:
            if request.session != event.session or not _is_at(replica, request):
                continue  # as above
            with records_about(request.log_fields):
                log_trouble("draft", event)
                handled = self._on_event(request, event, timing, handled, is_draft=True)

    def _first_of(self, batch: EventBatch[DraftEvent]) -> RequestState | None:
        """A request that the message is for."""
        sessions = [*[event.session for event in batch.events], *batch.sessions_in_batch]
        return next(filter(None, map(self._find, sessions)), None)

    def deliver(self, request: RequestState, event: Callable[[], None]) -> None:
        """Pass an event of the coordinator to a session; its output is delivered at once."""
        self._post_process()
        arrived = _now()
        with records_about(request.log_fields):
            try:
                event()
            except Exception as error:
                self._fail(request, error)
            self._actions.carry_out(request, arrived)
        request.flush()

    def _on_event(
        self,
        request: RequestState,
        event: Any,  # noqa: ANN401 - of either side
        timing: ItemTiming | None,
        arrived: float,
        *,
        is_draft: bool,
    ) -> float:
        if request.trace.notes is not None:
            request.trace.notes.answered(event, timing, is_draft=is_draft)
        take = request.loop.on_draft_event if is_draft else request.loop.on_target_event
        try:
            take(event, timing)
        except Exception as error:
            self._fail(request, error)
        return self._actions.carry_out(request, arrived)

    def _fail(self, request: RequestState, error: Exception) -> None:
        if not isinstance(error, OutriderError):
            with records_about(request.log_fields):
                _log.error("a session failed", exc_info=error)
            error = IntegrityError(f"the coordinator failed: {type(error).__name__}")
        request.loop.fail(error)

    def _end_with(self, request: RequestState, error: Exception) -> None:
        self._fail(request, error)
        self._actions.carry_out(request, _now())

    def _time_out_draft(self, request: RequestState, step: int) -> None:
        self.deliver(request, partial(request.loop.draft_timed_out, step))


def _is_at(replica: TargetReplica | DraftReplica, request: RequestState) -> bool:
    return replica is request.place.target or replica is request.place.draft


def call_after_commands(work: Callable[[], None], turns: int = _TURNS_TO_SEND) -> None:
    """Deferred work: call once the commands of this turn of the event loop are on their way."""
    loop = asyncio.get_running_loop()
    loop.call_soon(work if turns == 1 else partial(call_after_commands, work, turns - 1))
