"""HTTP/1 protocol of uvicorn with a limit on the time in which a request has to arrive.

uvicorn limits the time between two requests of a connection alone: a connection that never completes its request would
stay open for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_TIMEOUT_S = 60.0
"""For the request line, the headers and the body together; also for the first byte of a connection."""


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection whose request has not arrived after ``REQUEST_TIMEOUT_S``; answers are not limited."""

    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - asyncio's and uvicorn's types differ
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect_request()

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        super().on_message_begin()
        self._expect_request()

    def on_message_complete(self) -> None:
        """The request is there."""
        self._stop_waiting()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the limit."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
