"""Request runner: starts requests in order, returns them to the queue if there is no room, and ends them.

Requests whose readers are behind compute nothing, and after a while hold no pages. ``OutputCollector`` decides when a
reader is behind. The session finishes its step and begins no other. After ``MAX_PAUSE_WITH_PAGES_S`` it leaves both
services and its place among the running requests. When the reader reads on, it returns to its place in the queue and is
rebuilt from its tokens, as after a preemption.
"""

from __future__ import annotations

import asyncio
from functools import partial

from outrider.errors import CapacityError, OutriderError
from outrider.types import ModelDescription
from outrider_coordinator.requests.failover import Deliver, Failover
from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.placement import Placement, check_capacity
from outrider_coordinator.routing.services import Services
from outrider_coordinator.session.actions import Fail, Finish

MAX_PAUSE_WITH_PAGES_S = 1.0
"""Longer than the hiccups of a reader that is alive, which would each cost a prefill."""


class RequestRunner:
    """Starts and ends the requests of one coordinator."""

    def __init__(
        self,
        services: Services,
        placement: Placement,
        request_manager: RequestManager,
        failover: Failover,
        deliver: Deliver,
    ) -> None:
        self._services = services
        self._placement = placement
        self._request_manager = request_manager
        self._failover = failover
        self._deliver = deliver

    def submit(self, request: RequestState) -> None:
        """Admit a request; ``CapacityError`` if the queue is full. It pauses whenever its reader is behind."""
        collector = request.output_collector
        collector.on_behind = partial(self._pause, request)
        collector.on_caught_up = partial(self._resume, request)
        self._request_manager.submit(request)
        self._admit()

    def unblock(self) -> None:
        """The targets may have room again."""
        self._request_manager.admission.unblock()
        self._admit()

    def found_capacity(self, request: RequestState) -> None:
        """The target has room for the request."""
        request.place.refused_by.clear()
        if self._request_manager.admission.found_capacity(request):
            self._admit()

    def park(self, request: RequestState, retry_after_ms: int) -> None:
        """The target has no room: try another one, or wait at the head of the queue for pages, or for a delay."""
        if request.loop.is_paused:  # it needs no room before its reader reads on
            self._release(request)
            return
        place = request.place
        if place.target is not None:
            place.refused_by.add(place.target)
        self._placement.leave(place)
        # Whichever draft it is given when it starts again has to be told all.
        self._deliver(request, request.loop.draft_lost)
        if self._placement.place_on_target(place):
            self._request_manager.renumber(request)
            self._begin(request)
            return
        place.refused_by.clear()
        request.request_timings.note_parked()
        self._request_manager.park(request)
        request.call_later(retry_after_ms / 1000, self.unblock)

    def _pause(self, request: RequestState) -> None:
        """The reader is behind."""
        if request.is_over:
            return
        self._request_manager.endings.num_pauses += 1
        request.num_pauses += 1
        request.request_timings.note_paused()
        self._deliver(request, request.loop.pause)
        request.call_later(MAX_PAUSE_WITH_PAGES_S, partial(self._release_if_paused, request, request.num_pauses))

    def _release_if_paused(self, request: RequestState, pause: int) -> None:
        if request.loop.is_paused and request.num_pauses == pause:
            self._release(request)

    def _release(self, request: RequestState) -> None:
        """Release the pages and the place of a paused request."""
        self._deliver(request, request.loop.release)
        self._placement.leave(request.place)
        self._deliver(request, request.loop.draft_lost)  # as above
        request.place.refused_by.clear()
        request.request_timings.note_released()
        self._request_manager.pause(request)
        asyncio.get_running_loop().call_soon(self._admit)

    def _resume(self, request: RequestState) -> None:
        """The reader reads on: return the request to its place in the queue, if it was taken out."""
        if request.is_over:
            return
        request.request_timings.note_resumed()
        self._deliver(request, request.loop.resume)
        if self._request_manager.resume(request):
            request.request_timings.note_parked()
            self._admit()

    def end(self, request: RequestState, ending: Finish | Fail) -> None:
        """End the request."""
        self._placement.leave(request.place)
        request.end(ending)
        self._request_manager.end(request, ending)
        # In a later turn: this may be in the middle of an event for every session.
        asyncio.get_running_loop().call_soon(self._admit)

    def fail_too_long_requests(self, target: ModelDescription) -> None:
        """Fail requests that the targets can no longer hold, because they came back smaller."""
        for request in self._request_manager.all():
            engine_request = request.loop.engine_request
            try:
                check_capacity(target, len(engine_request.prompt_token_ids), engine_request.max_tokens)
            except OutriderError as error:
                self._deliver(request, partial(request.loop.fail, error))

    def _admit(self) -> None:
        """Start whichever requests may run now."""
        if self._services.target.is_up:
            for request in self._request_manager.to_start():
                request.admit()
                self._start(request)

    def _start(self, request: RequestState) -> None:
        if self._placement.place_on_target(request.place):
            self._begin(request)
        else:
            error = CapacityError("no target that could hold this request is attached now")
            self._deliver(request, partial(request.loop.fail, error))

    def _begin(self, request: RequestState) -> None:
        self._failover.find_draft(request)
        self._deliver(request, partial(request.loop.start, request.session))
