"""Propagation and export of spans: contexts as W3C writes them, what turns tracing on, the pipeline, the file."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from outrider.errors import ConfigError
from outrider.telemetry.tracing import TraceContext, activate_tracing, names
from outrider.telemetry.tracing.activation import exporter_names
from outrider.telemetry.tracing.otlp_json import request_to_json, spans_from_json
from outrider.telemetry.tracing.pipeline import MAX_WAITING, Pipeline, resource_of, to_sdk
from outrider.telemetry.tracing.span import Span, SpanKind, SpanLink
from outrider.telemetry.tracing.yielding_exporter import REST_S, SPANS_IN_A_ROW, YieldingExporter

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


def span(name: str = "a", number: int = 1) -> Span:
    return Span(
        name,
        TRACE,
        f"{number:016x}",
        SPAN,
        10**18,
        10**18 + 7,
        SpanKind.SERVER,
        {"text": "ä", "yes": True, "count": 3, "share": 0.5, "texts": ("b", "c")},
        (SpanLink(TRACE, SPAN),),
        error="why",
        trace_state="k=v",
    )


@pytest.mark.parametrize("flags", ["01", "00", "03"])
def test_a_context_is_what_was_written(flags: str) -> None:
    found = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}", "k=v")
    assert found == TraceContext(TRACE, SPAN, flags != "00", "k=v")
    assert TraceContext.parse(found.trace_parent, "k=v") == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)
def test_what_is_no_context_is_none(text: str) -> None:
    assert TraceContext.parse(text) is None


def test_a_later_version_may_say_more() -> None:
    assert TraceContext.parse(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, is_sampled=True)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ()),
        (ENDPOINT, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:1"}, ("otlp",)),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, ()),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, ()),
        ({"OTEL_TRACES_EXPORTER": "otlp, console,otlp"}, ("otlp", "console")),
    ],
)
def test_the_standard_variables_turn_it_on(environ: dict[str, str], expected: tuple[str, ...]) -> None:
    assert exporter_names(environ) == expected


def test_what_is_off_imports_nothing_of_opentelemetry() -> None:
    program = (
        "import sys, outrider_coordinator.service, outrider.client, outrider.process.hosting\n"
        "from outrider.telemetry.tracing import activate_tracing\n"
        "assert activate_tracing('coordinator', environ={}) is None\n"
        "print(*(name for name in sys.modules if name.startswith('opentelemetry')), end='')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_an_exporter_that_is_not_installed_and_a_file_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'pigeon', which is not installed"):
        activate_tracing("draft", environ={"OTEL_TRACES_EXPORTER": "pigeon"})
    with pytest.raises(ConfigError, match=r"trace_file.*cannot be written"):
        activate_tracing("draft", trace_file=str(tmp_path / "no" / "file"), environ={})


def test_a_span_is_the_same_again_as_json() -> None:
    request = json.loads(json.dumps(request_to_json([span()], {names.SERVICE_NAME: "s"})))
    (found,) = spans_from_json(request)
    assert found == replace(span(), service="s")


def test_spans_come_into_the_file_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    tracing = activate_tracing("draft", trace_file=str(path), environ={})
    assert tracing is not None
    tracing.emit(lambda: [span(number=number) for number in range(1, 300)])
    tracing.close()
    found = [one for line in path.read_text().splitlines() for one in spans_from_json(json.loads(line))]
    assert [one.span_id for one in found] == [f"{number:016x}" for number in range(1, 300)]
    assert {one.service for one in found} == {"outrider-draft"}
    assert found[0] == replace(span(), service="outrider-draft")
    assert path.stat().st_mode & 0o077 == 0


def test_a_caller_that_does_not_record_is_followed(tmp_path: Path) -> None:
    tracing = activate_tracing("coordinator", trace_file=str(tmp_path / "spans.jsonl"), environ={})
    assert tracing is not None
    assert tracing.sample("a", TraceContext(TRACE, SPAN, is_sampled=False)) is None
    found = tracing.sample("a", TraceContext(TRACE, SPAN, is_sampled=True, state="k=v"))
    assert found is not None
    assert (found.trace_id, found.is_sampled, found.state) == (TRACE, True, "k=v")
    assert found.span_id != SPAN
    tracing.close()


def test_what_is_too_much_is_dropped_and_counted_and_spans_that_cannot_be_made_harm_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "spans.jsonl"
    tracing = Pipeline.open("target", (), trace_file=str(path), environ={})
    gate, is_held = threading.Event(), threading.Event()

    def hold() -> Iterable[Span]:
        is_held.set()
        gate.wait()
        raise ValueError("cannot be made")

    tracing.emit(hold)
    assert is_held.wait(120)
    for number in range(MAX_WAITING + 3):
        tracing.emit(partial(list, [span(number=number + 1)] if number % 4096 == 0 else []))
    assert tracing.num_dropped == 3
    gate.set()
    with caplog.at_level(logging.WARNING):
        tracing.close()
    assert "3 requests or items were dropped" in caplog.text
    assert "spans could not be made" in caplog.text
    found = [one for line in path.read_text().splitlines() for one in spans_from_json(json.loads(line))]
    assert len(found) == MAX_WAITING // 4096


class _Walked(SpanExporter):
    """Walks over what it is given, as exporters do."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.names += [one.name for one in spans]
        assert (len(spans), spans[0].name) == (len(self.names), self.names[0])
        return SpanExportResult.SUCCESS


@pytest.mark.parametrize("is_ending", [False, True])
def test_an_exporter_gets_all_spans_with_rests_between_them_until_the_end(
    monkeypatch: pytest.MonkeyPatch, *, is_ending: bool
) -> None:
    rests: list[float] = []
    monkeypatch.setattr("outrider.telemetry.tracing.yielding_exporter.time.sleep", rests.append)
    ending, exporter = threading.Event(), _Walked()
    if is_ending:
        ending.set()
    resource = resource_of("draft", {})
    spans = [to_sdk(span(str(number), number), resource) for number in range(1, 2 * SPANS_IN_A_ROW + 2)]
    assert YieldingExporter(exporter, ending).export(spans) is SpanExportResult.SUCCESS
    assert exporter.names == [one.name for one in spans]
    assert rests == ([] if is_ending else [REST_S, REST_S])
