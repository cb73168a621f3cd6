"""Progress of a stack that starts, on a terminal and without one."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from outrider.cli.stack.plan import ServiceSpec
from outrider.cli.stack.running import TerminalListener, step_in

SPECS = [ServiceSpec(name, f"{name}_service", (), "127.0.0.1:1", 1.0) for name in ("target", "draft")]
LOADING = json.dumps(
    {"logger": "outrider.telemetry.progress", "message": "loading the target: 7 of 28 MiB", "done": 7, "total": 28}
)


def start_all(listener: TerminalListener) -> None:
    for spec in SPECS:
        listener.starting(spec)
    listener.line(SPECS[0], LOADING)
    for spec in SPECS:
        listener.serving(spec)
    listener.close()


def test_a_bar_a_service_on_a_terminal_and_no_line_of_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    listener = TerminalListener(0, Console(file=screen, force_terminal=True, width=120, highlight=False))
    start_all(listener)
    listener.starting(SPECS[1])  # again, beside other output: no bar
    listener.line(SPECS[0], LOADING)
    text = screen.getvalue()
    shown, after = text.rsplit("draft: serving", 1)
    for words in ("target: starting", "draft: starting", "target: loading the target: 7 of 28 MiB ", "━"):
        assert words in shown
    assert "━" not in after
    assert "target: loading the target: 7 of 28 MiB" in after


@pytest.mark.parametrize("is_terminal", [False, True], ids=["no terminal", "one that cannot draw"])
def test_lines_where_nobody_watches(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    start_all(TerminalListener(0, Console(file=file, force_terminal=is_terminal, no_color=True, width=120)))
    assert file.getvalue().splitlines() == [
        "target: loading the target: 7 of 28 MiB",
        "target: serving",
        "draft: serving",
    ]


@pytest.mark.parametrize("line", ["plain", "{broken", '{"logger": "outrider.telemetry.progress", "message": "x"}'])
def test_other_lines_say_nothing_of_how_far_it_is(line: str) -> None:
    assert step_in(line) is None
    assert step_in(LOADING) == ("loading the target: 7 of 28 MiB", 7, 28)
