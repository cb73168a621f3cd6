"""Draft waits: how long steps wait for each draft, and which steps continue without it.

``DraftTimeout`` derives the wait for one draft from its response times: it is 0 while the draft does not respond.
``DraftWaits`` owns one for each attached draft, and one timer for all steps that wait. The session decides what a step
does after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.services import DraftReplica
from outrider_coordinator.session.state import SessionStatus

MARGIN_RATIO = 8.0
"""Ratio of a draft's timeout to its slowest recent answer ..."""
FLOOR_RATIO = 0.5
"""... but not before this share of the longest wait: a busy machine is slow now and then."""
DECAY_RATIO = 0.99
"""Decay of the slowest answer's time, with each answer."""


class DraftTimeout:
    """The timeout of one draft's proposals; times are seconds of any monotonic clock."""

    def __init__(self, longest_s: float) -> None:
        """``longest_s``: the longest wait, which counts until the draft has answered once."""
        self._longest_s = longest_s
        self._slowest_s: float | None = None
        self._responded_at: float | None = None
        self.is_silent = False
        """A step waited in vain, and the draft has answered no step since."""

    @property
    def seconds(self) -> float:
        """Maximum wait of a step that begins to wait now, in seconds."""
        if self.is_silent:
            return 0.0
        if self._slowest_s is None:
            return self._longest_s
        return min(max(MARGIN_RATIO * self._slowest_s, FLOOR_RATIO * self._longest_s), self._longest_s)

    def note_response(self, now: float) -> None:
        """Record a response of the draft."""
        self._responded_at = now
        self.is_silent = False

    def note_wait(self, seconds: float) -> None:
        """Record the duration of a response, in time or late."""
        self._slowest_s = max(seconds, DECAY_RATIO * (self._slowest_s or 0.0))

    def note_timeout(self, began: float) -> None:
        """Record a wait since ``began`` without a response: if there was none at all since, the draft is silent."""
        if self._responded_at is None or self._responded_at < began:
            self.is_silent = True


class DraftWaits:
    """The waits of one coordinator's requests."""

    def __init__(
        self,
        longest_s: float,
        *,
        running: Callable[[], Iterable[RequestState]],
        time_out: Callable[[RequestState, int], None],
    ) -> None:
        """``longest_s``: the longest wait. ``time_out`` tells a request that the draft's time for a step is up."""
        self._longest_s = longest_s
        self._running, self._time_out = running, time_out
        self._timeouts: dict[DraftReplica | None, DraftTimeout] = {}
        """Timeouts of the drafts that are attached."""
        self._waiting: dict[RequestState, tuple[float, int]] = {}
        """Time until which each waiting request waits, by the event loop's clock, and the step that waits."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires when the first of these times is up, or before: to set one for every step would take longer."""

    def attached(self, draft: DraftReplica) -> None:
        """A draft is attached, with unknown response times."""
        self._timeouts[draft] = DraftTimeout(self._longest_s)

    def lost(self, draft: DraftReplica) -> None:
        """The link of a draft has ended."""
        self._timeouts.pop(draft, None)

    def begin(self, request: RequestState, step: int) -> None:
        """The step of the request begins to wait for a proposal."""
        timeout = self._timeouts.get(request.place.draft)
        request.draft_wait_began = now = asyncio.get_running_loop().time()
        due = now + (self._longest_s if timeout is None else timeout.seconds)
        self._waiting[request] = due, step
        if self._timer is None or due < self._timer.when():
            self._set_timer(due)

    def end(self, request: RequestState) -> None:
        """The request waits no more."""
        self._waiting.pop(request, None)

    def note_response(self, draft: DraftReplica, proposed: Iterable[RequestState]) -> None:
        """A message of the draft has arrived, with proposals for these requests, in time or late."""
        timeout = self._timeouts.get(draft)
        if timeout is None:
            return
        now = asyncio.get_running_loop().time()
        timeout.note_response(now)
        for request in proposed:
            began, request.draft_wait_began = request.draft_wait_began, None
            timeout.note_wait(0.0 if began is None else now - began)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        try:
            for request, wait in tuple(self._waiting.items()):
                if wait[0] <= now and self._waiting.get(request) is wait:  # it may have ended with one before
                    del self._waiting[request]
                    self._end_in_vain(request, wait[1])
        finally:
            if self._waiting:
                self._set_timer(min(due for due, _ in self._waiting.values()))

    def _end_in_vain(self, request: RequestState, step: int) -> None:
        draft = request.place.draft
        timeout = self._timeouts.get(draft)
        was_silent = timeout is not None and timeout.is_silent
        if timeout is not None and request.draft_wait_began is not None:
            timeout.note_timeout(request.draft_wait_began)
        self._time_out(request, step)
        if timeout is not None and timeout.is_silent and not was_silent:
            self._go_on_without(draft)

    def _go_on_without(self, draft: DraftReplica | None) -> None:
        """Let no other session wait for a draft that answers no session; its answers are taken when they come."""
        for request in self._running():
            if request.place.draft is draft and request.loop.status is SessionStatus.DRAFTING:
                self._time_out(request, request.loop.step)
