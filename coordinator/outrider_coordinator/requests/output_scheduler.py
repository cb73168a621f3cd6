"""Output scheduler: gives users their new output, after the commands that follow from it, a few users at a time.

Statistics, traces of times, text and streaming are all work of this kind: they wait until the services have begun their
next forwards.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from outrider_coordinator.requests.request_state import RequestState

REQUESTS_IN_A_TURN = 8
"""Requests flushed in one turn of the event loop; each takes a fraction of a tenth of a millisecond, and what a service
says meanwhile waits for no more than these."""


class OutputScheduler:
    """The requests whose output waits, in order."""

    def __init__(self) -> None:
        self._waiting: dict[RequestState, None] = {}
        self._is_due = False

    def put(self, requests: Iterable[RequestState]) -> None:
        """These have new output."""
        self._waiting.update(dict.fromkeys(requests))
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush_some)

    def _flush_some(self) -> None:
        try:
            for request in tuple(itertools.islice(self._waiting, REQUESTS_IN_A_TURN)):
                del self._waiting[request]
                request.flush()
        finally:
            self._is_due = bool(self._waiting)
            if self._is_due:
                asyncio.get_running_loop().call_soon(self._flush_some)
