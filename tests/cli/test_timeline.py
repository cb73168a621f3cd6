"""Timelines: what is drawn of a trace, its figures, the files, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.trace.timeline import BusyPeriod, Timeline, draw_timelines
from outrider.cli.trace.tree import build_tree
from outrider.cli.trace.waterfall import show_waterfall
from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.span import AttributeValue, Span
from tests.support.example_trace import BEGAN_NS, DECODE, DRAFT, HOUR_NS, MS, TARGET, TRACE, example_spans


def ahead(role: str, base: int, start_ms: int, took_ms: int) -> Span:
    start = BEGAN_NS + start_ms * MS
    said: dict[str, AttributeValue] = {names.ROLE: role, names.BASE_LENGTH: base}
    span = Span(names.AHEAD, TRACE, f"{base}{start_ms}{role[0]}", DECODE, start, start + took_ms * MS, attributes=said)
    return replace(span, service=DRAFT if role == "draft" else TARGET)


def spans() -> list[Span]:
    """A prefill step of 7 tokens and a step with drafts after 8, of three services with one clock."""
    found = []
    for span in example_spans():
        late = HOUR_NS if span.service == TARGET else 0
        base = {names.BASE_LENGTH: 6 + int(str(span.attributes.get(names.STEP_NUMBER, 0)))}
        said = {**span.attributes, **(base if span.name == names.STEP else {})}
        found.append(replace(span, start_ns=span.start_ns - late, end_ns=span.end_ns - late, attributes=said))
    return [*found, ahead("draft", 8, 46, 4), ahead("draft", 9, 60, 20), ahead("target", 8, 45, 5)]


@pytest.fixture
def timeline() -> Timeline:
    return Timeline("ahead", build_tree(spans(), TRACE))


def test_work_ahead_belongs_to_the_step_that_used_it(timeline: Timeline) -> None:
    second = timeline.steps[1]
    assert {str(each.span.attributes[names.ROLE]) for each in second.named(names.AHEAD)} == {"draft", "target"}
    work = {each for each in timeline.work if each.outcome}
    assert {(each.role, each.outcome, (each.end_ns - each.start_ns) // MS) for each in work} == {
        ("draft", "used", 4), ("target", "used", 5), ("draft", "unused", 20),
    }  # fmt: skip
    forward = BusyPeriod("target", BEGAN_NS + 68 * MS, BEGAN_NS + 96 * MS)
    assert forward in set(timeline.work)


def test_a_step_without_drafts_has_used_no_proposal() -> None:
    found = [
        replace(span, attributes={**span.attributes, names.DRAFT_LENGTH: 0, names.NO_DRAFT_REASON: "nothing_proposed"})
        if span.name == names.STEP
        else span
        for span in spans()
    ]
    figures = Timeline("ahead", build_tree(found, TRACE)).figures
    assert (figures["hits"], figures["misses"]) == (0, 2)
    assert (figures["draft ahead, used ms"], figures["draft ahead, unused ms"]) == (0.0, 24.0)


def test_figures_and_the_waterfall_count_what_was_used_and_what_was_not(timeline: Timeline) -> None:
    figures = timeline.figures
    assert figures["ms a token"] == pytest.approx(50 / 3)
    assert (figures["hits"], figures["misses"]) == (1, 0)
    assert (figures["draft ahead, used ms"], figures["draft ahead, unused ms"]) == (4.0, 20.0)
    assert (figures["target ahead, used ms"], figures["target ahead, unused ms"]) == (5.0, 0.0)
    console = Console(file=StringIO(), width=120)
    show_waterfall(console, timeline.root, max_steps=9)
    assert isinstance(console.file, StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["ahead:", "unused", "draft", "1", "20.00", "ms"] in [line[:6] for line in lines]
    assert "target+draft" in next(line for line in lines if line[:3] == ["2", "50.00", "ms"])


def test_a_drawing_names_every_request_and_service(timeline: Timeline, tmp_path: Path) -> None:
    plain = Timeline("without drafts", build_tree(example_spans(), TRACE))
    files = [tmp_path / f"a.{ending}" for ending in ("svg", "png")]
    draw_timelines([plain, timeline], files, num_steps=2)
    words = [item.text or "" for item in ET.parse(files[0]).iter("{http://www.w3.org/2000/svg}text")]
    assert {"target", "draft", "coordinator", "+3"} <= set(words)
    assert any(word.startswith("ahead: 3 tokens here") and "1 proposals ahead" in word for word in words)
    assert any(word.startswith("without drafts: ") and "proposals" not in word for word in words)
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--address", "127.0.0.1:1"], "--address: has no part in a timeline"),
        (["--out", "no/folder/here"], "no/folder/here cannot be written"),
        (["some-folder"], "--draft-model: is needed"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "ahead", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code and said in " ".join(result.output.split())


def test_without_matplotlib_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    result = CliRunner().invoke(app, ["bench", "ahead"], env={"COLUMNS": "200"})
    assert result.exit_code and "a timeline needs matplotlib: pip install" in " ".join(result.output.split())
