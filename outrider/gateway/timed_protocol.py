"""HTTP/1 protocol of uvicorn with limits on the time in which a request has to arrive, its headers and its pipeline.

uvicorn limits the time between two requests of a connection alone: a connection that never completes its request would
stay open for ever. Its parser keeps a header until its end, and headers come before any key is checked: one that does
not end would take all memory. When a connection is lost, it tells only the newest request, and it stops reading behind
a pipelined request, so that it does not see a client leave.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

REQUEST_TIMEOUT_S = 60.0
"""Time limit for the request line, the headers and the body together; also for the first byte of a connection."""
MAX_HEADER_BYTES = 64 << 10
"""Bound on the request line and the headers, or of what follows a body in pieces; what comes with the first read or
with the last is not counted."""
MAX_PIPELINED_BYTES = HIGH_WATER_LIMIT
"""Bound on the requests that wait behind one that is being answered. Later requests are not taken: the connection
closes after the answers to those before them, and the client sends them again."""


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection whose request has not arrived after ``REQUEST_TIMEOUT_S``, or whose headers are longer than
    ``MAX_HEADER_BYTES``; answers are not limited. A connection that is lost ends all of its requests.
    """

    _arrival: asyncio.TimerHandle | None = None
    _num_header_bytes = 0
    _has_advanced = False
    """True if the last bytes read began or ended headers, brought a part of a body, or ended a request."""
    _are_headers_complete = False
    _num_pipelined_bytes = 0
    _is_full = False
    """More requests than may wait have come: what is received is discarded."""
    _unanswered: list[RequestResponseCycle]

    def data_received(self, data: bytes) -> None:
        """Parse, and count what neither completes headers nor is of a body."""
        if self._is_full:
            return
        self._has_advanced = False
        super().data_received(data)
        self._num_header_bytes = 0 if self._has_advanced else self._num_header_bytes + len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers are longer than {MAX_HEADER_BYTES} bytes.")
        self._limit_pipeline(len(data))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; the trailers of a body in pieces are dropped."""
        if not self._are_headers_complete:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are there."""
        self._has_advanced = self._are_headers_complete = True
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._has_advanced = True
        super().on_body(body)

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - asyncio's and uvicorn's types differ
        """Wait for the first request."""
        super().connection_made(transport)
        self._unanswered = []
        self._expect_request()

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        self._has_advanced, self._are_headers_complete = True, False
        super().on_message_begin()
        self._expect_request()

    def on_message_complete(self) -> None:
        """The request is there."""
        self._has_advanced = True
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered; the next that waits begins."""
        self._num_pipelined_bytes = 0
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the requests that are not answered: those that wait are never begun."""
        self._stop_waiting()
        self.pipeline.clear()
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unanswered.clear()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        """False: a WebSocket request is handled as any other, which no endpoint answers."""
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """No line: what is asked for is refused."""

    def _limit_pipeline(self, num_bytes: int) -> None:
        """Go on reading behind a request that waits, since a client that leaves is seen by reading alone."""
        if not self.pipeline:
            return
        self._num_pipelined_bytes += num_bytes
        if self._num_pipelined_bytes > MAX_PIPELINED_BYTES:
            self._is_full = True
            self._stop_waiting()
            self._drop_unfinished()
        self.flow.resume_reading()

    def _drop_unfinished(self) -> None:
        """Forget the newest request if it has not arrived whole; the connection closes after the last that is kept."""
        if self.pipeline[0][0].more_body:
            self.pipeline.popleft()
            self._unanswered.remove(self.cycle)
            self.cycle = self._unanswered[-1]
        self.cycle.keep_alive = False

    def _expect_request(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
