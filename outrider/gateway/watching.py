"""HTTP requests watched: their count and times as metrics, and a span for each that is sampled.

Plain ASGI around all other middleware, so that refusals are seen too. Costs nothing for what is not asked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.readings import REQUEST_SECONDS, Histogram, Reading
from outrider.telemetry.tracing import TraceContext, Tracing, names
from outrider.telemetry.tracing.context import TRACE_PARENT, TRACE_STATE
from outrider.telemetry.tracing.span import AttributeValue, Span, SpanKind

TRACE = "trace"
"""Key of the request's state: the context of its span, for the calls that it makes."""
OTHER = "other"
_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ping",
        "/version",
    }
)
_GENERATIONS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
_PROBED = frozenset({"/health", "/ping", "/version"})
"""Paths that probes request every few seconds: counted, and no span each."""
_CLIENT_GONE = 499
_FIRST_BYTE_NS = "outrider.http.first_byte_ns"


@dataclass(slots=True)
class _Seen:
    """One request."""

    method: str
    path: str
    """One of those that are served, else ``OTHER``: what callers make up is no label."""
    began_ns: int
    """Start by the monotonic clock, as ``first_byte_ns``."""
    epoch_ns: int
    """Offset of the wall clock from that clock when the request began."""
    status: int = _CLIENT_GONE
    first_byte_ns: int = 0
    request_id: str = ""


class HttpWatch:
    """Totals of the requests of one gateway. Belongs to one event loop."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._num_running = 0
        self._ended: Counter[tuple[str, int]] = Counter()
        self._seconds = {path: Histogram(REQUEST_SECONDS) for path in sorted(_GENERATIONS)}
        self._first_byte_seconds = {path: Histogram(REQUEST_SECONDS) for path in sorted(_GENERATIONS)}

    def readings(self) -> Iterable[Reading]:
        """The figures, under the names of the catalogue."""
        yield Reading("outrider_http_requests_running", self._num_running)
        for (path, status), count in self._ended.items():
            yield Reading("outrider_http_requests_total", count, (("path", path), ("status", str(status))))
        for path, seconds in self._seconds.items():
            yield Reading("outrider_http_request_seconds", seconds.read(), (("path", path),))
        for path, seconds in self._first_byte_seconds.items():
            yield Reading("outrider_http_first_byte_seconds", seconds.read(), (("path", path),))

    def sample(self, scope: Scope, seen: _Seen) -> tuple[TraceContext | None, str]:
        """The context of the request's span, None without one; and the caller's span, empty without one."""
        if self._tracing is None or seen.path in _PROBED:
            return None, ""
        headers = dict(scope["headers"])
        given, state = (headers.get(key.encode(), b"").decode("latin-1") for key in (TRACE_PARENT, TRACE_STATE))
        caller = TraceContext.parse(given, state) if given else None
        return self._tracing.sample(_name(seen), caller), caller.span_id if caller else ""

    def began(self) -> None:
        """A request has come."""
        self._num_running += 1

    def ended(self, seen: _Seen, context: TraceContext | None, parent_id: str) -> None:
        """Record the end of a request."""
        self._num_running -= 1
        self._ended[seen.path, seen.status] += 1
        now = time.perf_counter_ns()
        if seen.path in _GENERATIONS:
            self._seconds[seen.path].observe((now - seen.began_ns) / 1e9)
            if seen.first_byte_ns:
                self._first_byte_seconds[seen.path].observe((seen.first_byte_ns - seen.began_ns) / 1e9)
        if context is not None and self._tracing is not None:
            self._tracing.emit(lambda: _spans(seen, context, parent_id, now))


class Watched:
    """Middleware: tells the watch of each request, and the request of its span."""

    def __init__(self, app: ASGIApp, watch: HttpWatch) -> None:
        self._app, self._watch = app, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else OTHER
        began_ns = time.perf_counter_ns()
        seen = _Seen(scope["method"], path, began_ns, time.time_ns() - began_ns)
        state: dict[str, Any] = scope.setdefault("state", {})
        context, parent_id = self._watch.sample(scope, seen)
        state[TRACE] = context

        async def send_seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
            elif not seen.first_byte_ns and message.get("body"):
                seen.first_byte_ns = time.perf_counter_ns()
            await send(message)

        self._watch.began()
        try:
            await self._app(scope, receive, send_seen)
        finally:
            seen.request_id = state.get("made_id") or state.get("request_id") or ""
            self._watch.ended(seen, context, parent_id)


def _name(seen: _Seen) -> str:
    return seen.method if seen.path == OTHER else f"{seen.method} {seen.path}"


def _spans(seen: _Seen, context: TraceContext, parent_id: str, ended_ns: int) -> Iterator[Span]:
    attributes: dict[str, AttributeValue] = {
        "http.request.method": seen.method,
        "http.response.status_code": seen.status,
    }
    if seen.path != OTHER:
        attributes["http.route"] = seen.path
    if seen.request_id:
        attributes[names.REQUEST_ID] = seen.request_id
    if seen.first_byte_ns:
        attributes[_FIRST_BYTE_NS] = seen.first_byte_ns - seen.began_ns
    yield Span(
        _name(seen),
        context.trace_id,
        context.span_id,
        parent_id,
        seen.epoch_ns + seen.began_ns,
        seen.epoch_ns + ended_ns,
        SpanKind.SERVER,
        attributes,
        error="" if seen.status < 500 else f"status {seen.status}",
        trace_state=context.state,
    )
