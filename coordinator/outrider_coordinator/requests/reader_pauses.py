"""Reader pauses: requests whose readers are behind compute nothing, and after a while hold no pages.

``OutputCollector`` decides when a reader is behind. The session finishes its step and begins no other. After
``MAX_PAUSE_WITH_PAGES_S`` it leaves both services and its place among the running requests. When the reader reads on,
it returns to its place in the queue and is rebuilt from its tokens, as after a preemption.
"""

from __future__ import annotations

from functools import partial

from outrider_coordinator.requests.failover import Deliver
from outrider_coordinator.requests.request_manager import RequestManager
from outrider_coordinator.requests.request_runner import RequestRunner
from outrider_coordinator.requests.request_state import RequestState

MAX_PAUSE_WITH_PAGES_S = 1.0
"""Longer than the hiccups of a reader that is alive, which would each cost a prefill."""


class ReaderPauses:
    """The pauses of one coordinator's requests."""

    def __init__(self, request_manager: RequestManager, runner: RequestRunner, deliver: Deliver) -> None:
        self._request_manager = request_manager
        self._runner = runner
        self._deliver = deliver

    def watch(self, request: RequestState) -> None:
        """Pause the request whenever its reader is behind."""
        collector = request.output_collector
        collector.on_behind = partial(self._pause, request)
        collector.on_caught_up = partial(self._resume, request)

    def _pause(self, request: RequestState) -> None:
        if request.is_over:
            return
        self._request_manager.endings.num_pauses += 1
        request.pause()
        self._deliver(request, request.loop.pause)
        request.call_later(MAX_PAUSE_WITH_PAGES_S, partial(self._release, request, request.num_pauses))

    def _release(self, request: RequestState, pause: int) -> None:
        if request.loop.is_paused and request.num_pauses == pause:
            self._runner.pause(request)

    def _resume(self, request: RequestState) -> None:
        if request.is_over:
            return
        request.resume()
        self._deliver(request, request.loop.resume)
        self._runner.resume(request)
