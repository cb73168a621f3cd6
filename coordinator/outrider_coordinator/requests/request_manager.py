"""Request manager: all requests of a coordinator, waiting or running, and statistics of those that ended.

Owns session numbers, the load for the draft length policy, and the counters. Sends and starts nothing itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

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
from outrider.readings import LENGTHS, Histogram
from outrider.types import FinishReason
from outrider_coordinator.requests.admission import Admission
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.session.actions import Fail, Finish
from outrider_coordinator.session.table import SessionTable
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import SpecDecodeStats

_USUAL = (
    CapacityError, IntegrityError, InvalidRequestError, LostTooOftenError, NonFiniteLogitsError,
    ProtocolError, UnavailableError,
)  # fmt: skip
USUAL_FAILURES = tuple(error.__name__ for error in _USUAL)


@dataclass(slots=True)
class Endings:
    """Counters of ended requests, with speculation statistics."""

    num_expired: int = 0
    """Ended by their callers' deadlines, which are no failures."""
    num_failed: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests that were taken in."""
    num_resumed: int = 0
    """Taken in with output of an interrupted call."""
    num_pauses: int = 0
    """Pauses of requests whose readers were behind, those that run included."""
    by_reason: Counter[FinishReason] = field(default_factory=Counter)
    """Requests that finished or were cancelled."""
    by_error: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(USUAL_FAILURES, 0)))
    """Failed requests, by the error's name; usual ones are there from the start, so that a rate sees them rise."""
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    """Prompt lengths in tokens of requests that have ended; so are the next fields."""
    generation_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    spec_stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)


class RequestManager:
    """The admitted requests that have not ended."""

    def __init__(self, policy: DraftLengthPolicy, *, max_running_per_target: int, max_queue: int) -> None:
        self.endings = Endings()
        self.policy = policy
        self.table = SessionTable()
        """Rows of the sessions that run."""
        self._max_running_per_target = max_running_per_target
        self.admission: Admission[RequestState] = Admission(max_running=max_running_per_target, max_queue=max_queue)
        self._by_session: dict[int, RequestState] = {}
        self._numbers = itertools.count(1)

    def all(self) -> tuple[RequestState, ...]:
        """Running, waiting and paused requests."""
        return (*self.admission.running, *self.admission.waiting, *self.admission.paused)

    def running(self) -> tuple[RequestState, ...]:
        """Running requests."""
        return tuple(self.admission.running)

    def find(self, session: int) -> RequestState | None:
        """The running request with this session number."""
        return self._by_session.get(session)

    def set_num_targets(self, num_targets: int) -> None:
        """Set the limit of running requests by the number of targets; that of one target while there is none."""
        self.admission.max_running = self._max_running_per_target * max(1, num_targets)

    def submit(self, request_state: RequestState) -> None:
        """Admit a request to the queue; ``CapacityError`` if the queue is full."""
        self.admission.submit(request_state, priority=request_state.loop.engine_request.priority)
        self.endings.num_prompt_tokens += len(request_state.loop.engine_request.prompt_token_ids)
        self.endings.num_resumed += bool(request_state.loop.engine_request.emitted_token_ids)
        self._note_load()

    def to_start(self) -> Iterator[RequestState]:
        """The requests that may start now, each with a new session number."""
        while (request_state := self.admission.next()) is not None:
            self.renumber(request_state)
            yield request_state

    def renumber(self, request_state: RequestState) -> None:
        """Give the request a session number that was never used on any link."""
        self._by_session.pop(request_state.session, None)
        request_state.session = next(self._numbers)
        self._by_session[request_state.session] = request_state

    def park(self, request_state: RequestState) -> None:
        """Return a request without room to its place in the queue, which stops until ``unblock``."""
        self._by_session.pop(request_state.session, None)
        self.admission.put_back(request_state)

    def pause(self, request_state: RequestState) -> None:
        """Take a request whose pages are released out, until ``resume``."""
        self._by_session.pop(request_state.session, None)
        self.admission.pause(request_state)
        self._note_load()

    def resume(self, request_state: RequestState) -> bool:
        """Return a request to its place in the queue; return whether it was taken out."""
        was_paused = self.admission.resume(request_state)
        self._note_load()
        return was_paused

    def end(self, request_state: RequestState, ending: Finish | Fail) -> None:
        """Record the end of a request."""
        self._by_session.pop(request_state.session, None)
        request_state.loop.table.leave(request_state.loop)
        self.admission.leave(request_state)
        self._note_load()
        self._count(request_state, ending)

    def _note_load(self) -> None:
        self.policy.num_requests = len(self.admission.running) + len(self.admission.waiting)

    def spec_stats(self) -> SpecDecodeStats:
        """Speculation statistics of all requests, running ones included."""
        whole = SpecDecodeStats()
        whole.add(self.endings.spec_stats)
        for request_state in self.all():
            whole.add(request_state.loop.spec_stats)
        return whole

    def _count(self, request_state: RequestState, ending: Finish | Fail) -> None:
        endings = self.endings
        endings.spec_stats.add(request_state.loop.spec_stats)
        endings.prompt_lengths.observe(len(request_state.loop.engine_request.prompt_token_ids))
        endings.generation_lengths.observe(request_state.loop.spec_stats.num_emitted_tokens)
        if isinstance(ending, Fail):
            if isinstance(ending.error, DeadlineError):
                endings.num_expired += 1
                return
            endings.num_failed += 1
            endings.by_error[type(ending.error).__name__] += 1
            return
        endings.by_reason[ending.reason] += 1
