"""Logs of a process, its end, and its progress where no terminal watches."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest

from outrider.errors import ConfigError
from outrider.telemetry import exit_cleanly, set_up_logging
from outrider.telemetry.progress import ByteProgress, CountProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_one_json_object_a_line_where_no_one_is_watching() -> None:
    stream = io.StringIO()
    set_up_logging("info", service="target", stream=stream)
    logging.getLogger("outrider.model_executor").info("loaded %d pages", 7, extra={"fields": {"num_pages": 7}})
    logging.getLogger("outrider.model_executor").debug("not said")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "loaded 7 pages"
    assert (entry["level"], entry["service"], entry["logger"]) == ("info", "target", "outrider.model_executor")
    assert entry["num_pages"] == 7


def test_a_traceback_stays_in_its_line() -> None:
    stream = io.StringIO()
    set_up_logging("info", service="target", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("outrider").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["error"]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["json", "plain"])
@pytest.mark.parametrize("end", ["\n", "\r", "\x1b[2K", "\x85", "\u2028", "\x0b"])
def test_a_text_of_a_caller_forges_no_line(stream: io.StringIO, end: str) -> None:
    stream.seek(0)
    stream.truncate()
    set_up_logging("info", service="coordinator", stream=stream)
    forged = f"x{end}12:00:00 INFO    coordinator: all is well"
    log = logging.getLogger("outrider")
    log.info("asked by %s", forged, extra={"fields": {"request_id": forged}})
    try:
        raise ValueError(forged)
    except ValueError:
        log.exception("failed for %s", forged)
    written = stream.getvalue()
    assert end == "\n" or end not in written
    assert not any(line.startswith("12:00:00") for line in written.splitlines())
    assert written.count("all is well") >= 4


def test_lines_for_people_on_a_terminal() -> None:
    stream = Terminal()
    set_up_logging("debug", service="draft", stream=stream)
    logging.getLogger("outrider").debug("ready", extra={"fields": {"port": 5}})
    assert "draft: ready port=5" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_setting_up_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up_logging("info", service="a", stream=first)
    set_up_logging("warning", service="a", stream=second)
    logging.getLogger("outrider").info("quiet")
    logging.getLogger("outrider").warning("heard")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_an_error_of_ours_is_a_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, exit_cleanly():
        raise ConfigError("target.port", "is in use")
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: target.port: is in use\n"


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), exit_cleanly():
        _ = 1 / 0


def test_an_interrupt_is_exit_code_130() -> None:
    with pytest.raises(SystemExit) as caught, exit_cleanly():
        raise KeyboardInterrupt
    assert caught.value.code == 130


def test_the_end_is_logged_and_what_lasts(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "outrider.telemetry.progress")  # others log meanwhile
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = CountProgress("capturing")
    for done in range(1, 29):
        now += 0.5
        progress(done, 28)
    assert caplog.messages == [f"capturing: {done} of 28" for done in (12, 23, 28)]


def test_bytes_are_told_in_mebibytes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.telemetry.progress")  # others log meanwhile
    ByteProgress("loading")(3 << 20, 3 << 20)
    assert caplog.messages == ["loading: 3 of 3 MiB"]


def test_a_second_run_is_told_as_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.telemetry.progress")  # others log meanwhile
    progress = CountProgress("capturing")
    for _ in range(2):
        for done in (1, 2):
            progress(done, 2)
    assert caplog.messages == ["capturing: 2 of 2"] * 2
