"""HTTP/1 protocol of uvicorn with limits on the time in which a request has to arrive, and on its headers.

uvicorn limits the time between two requests of a connection alone: a connection that never completes its request would
stay open for ever. Its parser keeps a header until its end, and headers come before any key is checked: one that does
not end would take all memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_TIMEOUT_S = 60.0
"""For the request line, the headers and the body together; also for the first byte of a connection."""
MAX_HEADER_BYTES = 64 << 10
"""Of the request line and the headers, or of what follows a body in pieces; what comes with the first read or with
the last is not counted."""


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection whose request has not arrived after ``REQUEST_TIMEOUT_S``, or whose headers are longer than
    ``MAX_HEADER_BYTES``; answers are not limited.
    """

    _arrival: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _has_advanced = False
    """Whether what was read last began or ended headers, brought a part of a body, or ended a request."""

    def data_received(self, data: bytes) -> None:
        """Parse, and count what neither completes headers nor is of a body."""
        self._has_advanced = False
        super().data_received(data)
        self._num_header_bytes = 0 if self._has_advanced else self._num_header_bytes + len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers are longer than {MAX_HEADER_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """The headers are there."""
        self._has_advanced = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._has_advanced = True
        super().on_body(body)

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - asyncio's and uvicorn's types differ
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect_request()

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        self._has_advanced = True
        super().on_message_begin()
        self._expect_request()

    def on_message_complete(self) -> None:
        """The request is there."""
        self._has_advanced = True
        self._stop_waiting()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the limit."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        """Never: a WebSocket is asked for by a request like any other, which no endpoint answers."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """No line: what is asked for is refused."""

    def _expect_request(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
