"""Output scheduler: delivers output after the commands that follow from it, for a few requests at a time.

Statistics, trace records, text and streaming wait until the services have started their next forwards.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from outrider_coordinator.requests.request_state import RequestState

REQUESTS_IN_A_TURN = 2
"""Requests flushed in one turn of the event loop; each takes a fraction of a tenth of a millisecond, and what a service
says meanwhile waits for no more than these."""


class OutputScheduler:
    """Requests with waiting output, in order."""

    def __init__(self) -> None:
        self._waiting: dict[RequestState, None] = {}
        self._has_commands = False
        """Commands were put together since users last had output."""

    def commands_first(self) -> None:
        """A message has arrived: its commands are sent before any waiting output."""
        self._has_commands = True

    def put(self, requests: Sequence[RequestState]) -> None:
        """Add requests with new output."""
        if requests and not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_after_commands)
        self._waiting.update(dict.fromkeys(requests))

    def _flush_after_commands(self) -> None:
        if self._has_commands:
            # They are put together in this turn and written in the next.
            self._has_commands = False
            asyncio.get_running_loop().call_soon(self._flush_some)
        else:
            self._flush_some()

    def _flush_some(self) -> None:
        try:
            for request in tuple(itertools.islice(self._waiting, REQUESTS_IN_A_TURN)):
                del self._waiting[request]
                request.flush()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._flush_after_commands)
