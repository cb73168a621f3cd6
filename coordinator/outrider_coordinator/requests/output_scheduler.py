"""Output scheduler: delivers output after the commands that follow from it, for a few requests at a time.

Statistics, trace records, text and streaming wait until the services have started their next forwards. The rate of
messages to users is bounded (``MessageAllowance``): with more, the tokens of several steps of a request go in one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from outrider_coordinator.requests.message_allowance import MessageAllowance
from outrider_coordinator.requests.request_state import RequestState

REQUESTS_IN_A_TURN = 2
"""Requests flushed in one turn of the event loop; each takes a fraction of a tenth of a millisecond, and what a service
says meanwhile waits for no more than these."""
LONGEST_WAIT_S = 0.02
"""Longest pause of output that is held back: it goes on with that of the next step, right after its commands, while
services compute.
"""


class OutputScheduler:
    """Requests with waiting output, in order."""

    def __init__(self, allowance: MessageAllowance) -> None:
        self._waiting: OrderedDict[RequestState, None] = OrderedDict()
        self._first: OrderedDict[RequestState, None] = OrderedDict()
        """Requests whose users have had no output yet. It is never held back."""
        self._has_commands = False
        """Commands were put together since users last had output."""
        self._is_due = False
        """The next turn of the event loop flushes some."""
        self._timer: asyncio.TimerHandle | None = None
        self._allowance = allowance

    def commands_first(self) -> None:
        """A message has arrived: its commands are sent before any waiting output."""
        self._has_commands = True

    def put(self, requests: Sequence[RequestState]) -> None:
        """Add requests with new output."""
        for request in requests:
            queue = self._waiting if request.has_had_output else self._first
            queue[request] = None  # one that waits keeps its place
        if requests:
            self._go_on()

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush_after_commands)

    def _flush_after_commands(self) -> None:
        if self._has_commands:
            # They are put together in this turn and written in the next.
            self._has_commands = False
            asyncio.get_running_loop().call_soon(self._flush_some)
        else:
            self._flush_some()

    def _flush_some(self) -> None:
        self._allowance.refill()
        try:
            for _ in range(REQUESTS_IN_A_TURN):
                if (request := self._next()) is None:
                    break
                request.flush()
        finally:
            self._is_due = False
            if self._first or (self._waiting and self._allowance.is_open):
                self._go_on()
            elif self._waiting:
                self._timer = asyncio.get_running_loop().call_later(LONGEST_WAIT_S, self._go_on)

    def _next(self) -> RequestState | None:
        """The next request whose message may leave. Those that have ended had their output with the result."""
        for queue in (self._first, self._waiting):
            while queue and (queue is self._first or self._allowance.is_open):
                request, _ = queue.popitem(last=False)
                if not request.is_over:
                    if queue is self._waiting:
                        self._allowance.take()  # first ones do not count: however many, others are not held up
                    return request
        return None
