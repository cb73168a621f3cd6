"""One trace drawn: its tree, its figures, the terminal, the page, and what is said when it cannot be."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.trace.asking import TracedRequest, trace_files
from outrider.cli.trace.chrome import chrome_trace
from outrider.cli.trace.page import page_data, render_page
from outrider.cli.trace.reading import Followed, read_spans
from outrider.cli.trace.stages import stage_figures, summary
from outrider.cli.trace.tree import Node, build_tree, choose_trace, what_is_missing
from outrider.cli.trace.waterfall import show_waterfall
from outrider.errors import ConfigError, InvalidRequestError, UnavailableError
from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.otlp_json import request_to_json
from outrider.telemetry.tracing.span import Span
from tests.support.example_trace import COORDINATOR, DECODE, DRAFT, MS, TARGET, TRACE, example_spans
from tests.support.scripted_generator import INFO

runner = CliRunner()


@pytest.fixture
def root() -> Node:
    return build_tree(example_spans(), TRACE)


def save(folder: Path, spans: list[Span]) -> list[Path]:
    """A file for each service, as `trace_file` writes it."""
    files = []
    for service in (COORDINATOR, DRAFT, TARGET):
        export = request_to_json([span for span in spans if span.service == service], {names.SERVICE_NAME: service})
        files.append(folder / f"{service}.jsonl")
        files[-1].write_text(json.dumps(export) + "\n")
    return files


def steps_of(root: Node) -> list[Node]:
    return root.named(names.DECODE)[0].named(names.STEP)


def test_items_lie_where_the_coordinator_waited_for_them_whatever_their_clock_says(root: Node) -> None:
    for step in steps_of(root):
        for stage in (*step.named(names.DRAFT), *step.named(names.SCORE)):
            (item,) = stage.children
            assert item.start_ns == stage.start_ns
            for part in item.children:
                assert stage.start_ns <= part.start_ns <= part.end_ns <= stage.end_ns
    assert [node.span.name for node in root.named(names.DECODE)[0].children] == [names.STEP, names.STEP]


def test_a_forward_shared_with_other_requests_is_brought_in(root: Node) -> None:
    (item,) = steps_of(root)[1].named(names.SCORE)[0].children
    (forward,) = item.named(names.FORWARD)
    assert (forward.span.attributes[names.BATCH_SIZE], forward.span.duration_ns) == (2, 28 * MS)
    # As if it had been its alone: what a forward drew lies beside it.
    assert [child.span.name for child in item.children] == [names.QUEUE, names.FORWARD, names.SAMPLE]


def test_figures_are_those_of_the_spans(root: Node) -> None:
    found = {figures.name: figures for figures in stage_figures(root)}
    assert found["score"].count == 2
    assert found["score"].total_ns == 81 * MS
    assert found["wire"].total_ns == 5 * MS
    assert found["score"].share == pytest.approx(0.81)
    assert found["draft: forward"].total_ns == 8 * MS
    assert found["score: forward"].total_ns == 73 * MS
    assert found["score: sample"].total_ns == 2 * MS
    assert list(found).index("score: forward") == list(found).index("score") + 2
    said = dict(summary(root))
    assert said["to the first token"] == "50.00 ms"
    assert said["per token after it"] == "16.67 ms"
    assert said["of the draft kept"] == "50%"


def test_the_terminal_shows_every_step_and_counts_those_that_it_does_not(root: Node) -> None:
    def drawn(max_steps: int, **how: Any) -> str:
        console = Console(file=StringIO(), width=120, **how)
        show_waterfall(console, root, max_steps=max_steps)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    text = drawn(9)
    assert TRACE in text
    assert re.search(r"^1 +48\.00 ms +prefill", text, re.MULTILINE)
    assert re.search(r"^2 +50\.00 ms +2 of 4", text, re.MULTILINE)
    (second,) = re.findall(r"2 of 4 +(.+)$", text, re.MULTILINE)
    assert re.fullmatch(r" ?▒+·+█+\|+ *", second)  # without colours stages differ in their marks
    assert 0.6 < second.count("█") / len(second.strip()) < 0.8  # 35 of 49 ms
    assert "1 more are not shown" in drawn(1)
    assert "\x1b[" in drawn(9, force_terminal=True)


def test_steps_past_the_cap_are_said_to_be_missing() -> None:
    spans = [
        replace(span, attributes={**span.attributes, names.NUM_STEPS: 56, names.NUM_STEPS_NOT_SHOWN: 54})
        if span.span_id == DECODE
        else span
        for span in example_spans()
    ]
    assert what_is_missing(spans, TRACE) == []
    root = build_tree(spans, TRACE)
    console = Console(file=StringIO(), width=120)
    show_waterfall(console, root, max_steps=9)
    assert isinstance(console.file, StringIO)
    assert "54 more steps were only counted" in console.file.getvalue()
    assert page_data(root)["steps_not_traced"] == 54


class Page(HTMLParser):
    """References of a page, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in {"src", "href", "data", "action"}]
        if tag not in {"meta", "br", "link", "img", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_the_page_is_whole_and_refers_to_nothing_else(root: Node) -> None:
    text = render_page(root)
    page = Page(text)
    assert not page.open
    assert not page.references
    assert "url(" not in text
    assert "@import" not in text
    assert "://" not in text
    assert "default-src 'none'" in text
    (script,) = page.scripts
    found = re.search(r"const trace = (\{.*\});$", script, re.MULTILINE)
    assert found
    assert json.loads(found[1]) == json.loads(json.dumps(page_data(root)))
    used = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert used == set(re.findall(r'\bid="([\w-]+)"', text))


def test_what_a_request_is_named_cannot_end_the_script() -> None:
    spans = example_spans(request_id="</script><img src=x>\u2028")
    page = Page(render_page(build_tree(spans, TRACE)))
    assert len(page.scripts) == 1
    assert not page.references
    assert "\u2028" not in page.scripts[0]


def test_a_chrome_trace_has_a_process_for_each_service_and_nests_on_each_thread(root: Node) -> None:
    events = json.loads(chrome_trace(root))["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(named.values()) == {COORDINATOR, DRAFT, TARGET}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(list(root.walk()))
    for one in spans:
        for other in spans:
            if (one["pid"], one["tid"]) == (other["pid"], other["tid"]) and one["ts"] <= other["ts"]:
                end, other_end = (each["ts"] + each["dur"] for each in (one, other))
                assert other["ts"] >= end or other_end <= end or one["ts"] == other["ts"]


def test_files_of_three_services_are_one_trace(tmp_path: Path) -> None:
    files = save(tmp_path, example_spans())
    assert sorted(read_spans(files), key=repr) == sorted(example_spans(), key=repr)
    outcome = runner.invoke(
        app, ["trace", *map(str, files), "--html", str(tmp_path / "out.html"), "--chrome", str(tmp_path / "out.json")]
    )
    assert outcome.exit_code == 0, outcome.output
    assert "2 of 4" in outcome.stdout
    assert json.loads((tmp_path / "out.json").read_text())["otherData"] == {"trace_id": TRACE}
    assert TRACE in (tmp_path / "out.html").read_text()


def test_one_export_over_many_lines_and_other_signals_are_read(tmp_path: Path) -> None:
    export = request_to_json(example_spans(), {})
    spread, mixed = tmp_path / "spread.json", tmp_path / "mixed.jsonl"
    spread.write_text(json.dumps(export, indent=2))
    mixed.write_text(json.dumps({"resourceMetrics": []}) + "\n\n" + json.dumps(export) + "\n")
    assert len(read_spans([spread])) == len(read_spans([mixed])) == len(example_spans())


def test_the_last_request_is_drawn_unless_another_is_named(tmp_path: Path) -> None:
    other = "0d" * 16
    spans = example_spans() + example_spans(trace_id=other, later_ns=MS)
    assert choose_trace(spans, None) == other
    assert choose_trace(spans, "0A0A") == TRACE
    with pytest.raises(InvalidRequestError, match="is the beginning of 2"):
        choose_trace(spans, "0")
    with pytest.raises(InvalidRequestError, match="is not among the requests"):
        choose_trace(spans, "ff")
    outcome = runner.invoke(app, ["trace", *map(str, save(tmp_path, spans)), "--list"])
    assert [line.split()[0] for line in outcome.stdout.splitlines()] == ["trace", TRACE, other]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "is no export of spans"),
        ('{"resourceSpans": []}\n{"resourceSpans": ', "line 2 is no JSON"),
        ('{"resourceSpans": []}\n[]', "line 2 is no export of spans"),
        ('{"resourceSpans": []}', "there is no request in these spans"),
        ("", "there is no request in these spans"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text(content)
    outcome = runner.invoke(app, ["trace", str(path)])
    assert outcome.exit_code == 1
    assert said in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to trace"),
        (["--demo", "a.jsonl"], "reads no files"),
        (["--prompt", "a", "--list"], "are of spans in files"),
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read: No such file"),
        (["--prompt", "a", "--listen", "4317"], "should be HOST:PORT"),
    ],
)
def test_what_cannot_be_meant_is_said(arguments: list[str], said: str) -> None:
    outcome = runner.invoke(app, ["trace", *arguments])
    assert outcome.exit_code == 1
    assert said in outcome.stderr


def test_what_has_not_come_yet_is_known() -> None:
    spans = example_spans()

    def without(service: str) -> list[Span]:
        return [span for span in spans if span.service != service]

    assert what_is_missing(spans, TRACE) == []
    assert what_is_missing(without(DRAFT), TRACE) == ["draft"]
    assert what_is_missing(without(TARGET), TRACE) == ["target"]
    assert what_is_missing(without(COORDINATOR), TRACE) == ["coordinator"]
    assert what_is_missing([span for span in spans if span.name != names.ACCEPT], TRACE) == ["coordinator"]
    never_answered = [
        replace(span, attributes={names.GENERATION: 2}) if span.name == names.DRAFT else span for span in without(DRAFT)
    ]
    assert what_is_missing(never_answered, TRACE) == []


def test_a_trace_with_missing_parts_is_drawn_and_says_so(tmp_path: Path) -> None:
    files = save(tmp_path, [span for span in example_spans() if span.service != DRAFT])
    outcome = runner.invoke(app, ["trace", *map(str, files)])
    assert outcome.exit_code == 0
    assert "the draft's spans are not there" in outcome.stderr


def test_a_followed_file_gives_what_is_added_and_only_whole_lines(tmp_path: Path) -> None:
    (path,) = save(tmp_path, example_spans())[:1]
    followed = Followed([path, tmp_path / "later.jsonl"])
    line = path.read_text()
    assert followed.added() == []
    with path.open("a") as file:
        file.write(line[:50])
        file.flush()
        assert followed.added() == []
        file.write(line[50:])
    (tmp_path / "later.jsonl").write_text(line)
    assert len(followed.added()) == 2 * sum(span.service == COORDINATOR for span in example_spans())
    assert followed.added() == []


def test_an_error_is_drawn(tmp_path: Path) -> None:
    spans = [
        replace(span, error="cancelled by the caller", attributes={**span.attributes, names.ERROR_TYPE: "cancelled"})
        if span.span_id == DECODE or not span.parent_id
        else span
        for span in example_spans()
    ]
    outcome = runner.invoke(app, ["trace", *map(str, save(tmp_path, spans))])
    assert "cancelled: cancelled by the caller" in outcome.stdout


def test_listening_where_somebody_listens_is_refused() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from outrider.transport.otlp import serve_otlp

    async def twice() -> None:
        server = await serve_otlp(lambda _: None, host="127.0.0.1", port=0)
        try:
            with pytest.raises(ConfigError, match="cannot listen"):
                await serve_otlp(lambda _: None, host="127.0.0.1", port=int(server.address.rpartition(":")[2]))
        finally:
            await server.stop()

    asyncio.run(twice())


async def test_services_that_export_no_spans_are_not_waited_for(tmp_path: Path) -> None:
    class Untraced:
        def __enter__(self) -> Untraced:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def model_info(self) -> object:
            return INFO

    file = tmp_path / "spans.jsonl"
    file.touch()
    told = "the coordinator exports no spans: restart `outrider serve` with these files as trace_file"
    with pytest.raises(UnavailableError, match=told):
        await trace_files(Untraced, TracedRequest("a", 1, 0.0, 1), [file], wait_s=1e9)  # type: ignore[arg-type]
