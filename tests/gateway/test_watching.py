"""HTTP requests as metrics and spans: what is counted, and whose trace a request belongs to."""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.gateway import watching
from outrider.gateway.watching import HttpWatch
from outrider.readings import HistogramReading, Reading
from outrider.telemetry.metrics.catalogue import find
from outrider.telemetry.tracing import TraceContext
from outrider.telemetry.tracing.span import BuildSpans, Span, SpanKind
from tests.client.conftest import Service
from tests.gateway.conftest import Gateway, wait_until

CALLER = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


class Collecting:
    """Takes spans; samples what its caller samples."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def sample(self, name: str, parent: TraceContext | None) -> TraceContext | None:
        if parent is not None and not parent.is_sampled:
            return None
        return TraceContext(parent.trace_id if parent else "c" * 32, "d" * 16, True, parent.state if parent else "")

    def emit(self, build: BuildSpans) -> None:
        self.spans += build()

    def close(self) -> None:
        pass


@pytest.fixture
def tracing() -> Collecting:
    return Collecting()


@pytest.fixture
def watch(tracing: Collecting) -> HttpWatch:
    return HttpWatch(tracing)


@pytest.fixture
def watched(service: Service, watch: HttpWatch) -> Iterator[Gateway]:
    gateway = Gateway(service.address, watch=watch)
    yield gateway
    gateway.close()


def ask(gateway: Gateway, path: str, body: dict[str, Any] | None = None, **headers: str) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(gateway.url + path, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def by_labels(watch: HttpWatch, name: str) -> dict[tuple[str, ...], float | HistogramReading]:
    return {tuple(value for _, value in one.labels): one.value for one in watch.readings() if one.name == name}


def test_requests_are_counted_and_timed_by_path(watched: Gateway, watch: HttpWatch) -> None:
    for stream in (True, False):
        assert ask(watched, "/v1/completions", {"prompt": "hello", "max_tokens": 2, "stream": stream}) == 200
    assert ask(watched, "/v1/completions", {"prompt": "hello", "temperature": "x"}) == 400
    assert ask(watched, "/made/up/by/callers") == 404
    total = "outrider_http_requests_total"
    counts = {("/v1/completions", "200"): 2, ("/v1/completions", "400"): 1, ("other", "404"): 1}
    wait_until(lambda: by_labels(watch, total) == counts, "all requests counted")
    assert by_labels(watch, "outrider_http_requests_running") == {(): 0}
    for name in ("outrider_http_request_seconds", "outrider_http_first_byte_seconds"):
        of_path = by_labels(watch, name)[("/v1/completions",)]
        assert isinstance(of_path, HistogramReading)
        assert of_path.count == 3 and of_path.total > 0


def test_a_clock_that_is_set_back_makes_no_request_shorter(
    watched: Gateway, watch: HttpWatch, tracing: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(1)
    clock = SimpleNamespace(
        time_ns=lambda: time.time_ns() - next(hours) * 3600 * 10**9, perf_counter_ns=time.perf_counter_ns
    )
    monkeypatch.setattr(watching, "time", clock)
    asked = {"prompt": "hello", "max_tokens": 2, "stream": True}
    assert ask(watched, "/v1/completions", asked, traceparent=CALLER) == 200
    wait_until(lambda: tracing.spans, "a span")
    assert 0 < tracing.spans[0].duration_ns < 3600 * 10**9
    for name in ("outrider_http_request_seconds", "outrider_http_first_byte_seconds"):
        of_path = by_labels(watch, name)[("/v1/completions",)]
        assert isinstance(of_path, HistogramReading)
        assert 0 < of_path.total < 3600


def test_readings_are_those_of_the_catalogue(watched: Gateway, watch: HttpWatch) -> None:
    ask(watched, "/version")
    wait_until(lambda: by_labels(watch, "outrider_http_requests_total"), "a request counted")
    readings: list[Reading] = list(watch.readings())
    for reading in readings:
        spec = find(reading.name)
        assert spec.roles == ("gateway",)
        assert [label.name for label in spec.labels] == [name for name, _ in reading.labels]


def test_a_request_is_a_span_between_the_caller_and_the_coordinator(
    watched: Gateway, tracing: Collecting, service: Service
) -> None:
    headers = {"traceparent": CALLER, "tracestate": "v=1", "x-request-id": "mine"}
    assert ask(watched, "/v1/completions", {"prompt": "hello", "max_tokens": 2, "stream": True}, **headers) == 200
    wait_until(lambda: tracing.spans, "a span")
    (span,) = tracing.spans
    assert (span.name, span.kind, span.error) == ("POST /v1/completions", SpanKind.SERVER, "")
    assert (span.trace_id, span.span_id, span.parent_id, span.trace_state) == ("a" * 32, "d" * 16, "b" * 16, "v=1")
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["outrider.request.id"] == "mine"
    first_byte_ns = span.attributes["outrider.http.first_byte_ns"]
    assert isinstance(first_byte_ns, int) and 0 < first_byte_ns <= span.duration_ns
    request = service.generator.requests[0]
    assert (request.trace_parent, request.trace_state) == (f"00-{'a' * 32}-{'d' * 16}-01", "v=1")


def test_a_trace_that_is_not_sampled_passes_through(watched: Gateway, tracing: Collecting, service: Service) -> None:
    unsampled = CALLER[:-2] + "00"
    assert ask(watched, "/v1/completions", {"prompt": "hello", "max_tokens": 1}, traceparent=unsampled) == 200
    assert service.generator.requests[0].trace_parent == unsampled
    assert tracing.spans == []


def test_probes_are_counted_and_not_traced(watched: Gateway, tracing: Collecting, watch: HttpWatch) -> None:
    assert ask(watched, "/health", traceparent=CALLER) == 200
    wait_until(lambda: by_labels(watch, "outrider_http_requests_total") == {("/health", "200"): 1}, "a request counted")
    assert tracing.spans == []


def test_without_a_caller_the_trace_begins_here(watched: Gateway, tracing: Collecting, service: Service) -> None:
    assert ask(watched, "/v1/completions", {"prompt": "hello", "max_tokens": 1}) == 200
    assert service.generator.requests[0].trace_parent == f"00-{'c' * 32}-{'d' * 16}-01"
    wait_until(lambda: tracing.spans, "a span")
    assert tracing.spans[0].parent_id == ""
