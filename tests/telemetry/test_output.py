"""A stream that never blocks and never raises, over pipes, devices and files that cannot be written."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.telemetry import set_up_logging
from outrider.telemetry.output import MAX_PENDING_BYTES, DroppingStream, dropped_notice

DEADLINE_S = 240.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_lines_come_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = DroppingStream(writer)
    for number in range(100):
        stream.write(f"line {number} ä\n")
    stream.drain(DEADLINE_S)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", closefd=False) as read:
        assert read.read().splitlines() == [f"line {number} ä" for number in range(100)]


def test_a_pipe_that_nobody_reads_takes_no_time_and_what_did_not_fit_is_counted(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = DroppingStream(writer)
    line = "x" * 999 + "\n"
    num_lines = 4 * MAX_PENDING_BYTES // len(line)
    for _ in range(num_lines):
        stream.write(line)
    found = b""
    while b"dropped" not in found:
        found += os.read(reader, 1 << 16)
    os.set_blocking(reader, False)
    while not stream.is_drained:
        with contextlib.suppress(BlockingIOError):
            found += os.read(reader, 1 << 16)
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(reader, 1 << 16):
            found += chunk
    lines = found.decode().splitlines()
    notices = [one for one in lines if "dropped" in one]
    counts = [int(notice.split()[0]) for notice in notices]
    assert notices == [dropped_notice(count) for count in counts]
    assert sum(counts) > 0
    assert lines.count("x" * 999) + sum(counts) == num_lines


def test_an_output_that_fails_counts_and_tells_when_it_can_be_written_again(tmp_path: Path) -> None:
    file = (tmp_path / "log").open("wb")
    full = os.open("/dev/full", os.O_WRONLY)
    descriptor = os.dup(full)
    stream = DroppingStream(descriptor)
    for _ in range(3):
        stream.write("lost\n")
    stream.drain(DEADLINE_S)
    os.dup2(file.fileno(), descriptor)
    stream.write("kept\n")
    stream.drain(DEADLINE_S)
    assert (tmp_path / "log").read_text().splitlines() == [
        "3 lines dropped while this output could not be written",
        "kept",
    ]


def test_what_was_dropped_of_a_log_is_a_record_of_the_log(tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        stream = DroppingStream(full)
        set_up_logging("info", service="draft", stream=stream)  # type: ignore[arg-type]
        logging.getLogger("outrider").info("lost")
        stream.drain(DEADLINE_S)
        with (tmp_path / "log").open("wb") as file:
            os.dup2(file.fileno(), full)
        logging.getLogger("outrider").info("kept")
        stream.drain(DEADLINE_S)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    dropped, kept = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (dropped["level"], dropped["service"], dropped["num_dropped"]) == ("warning", "draft", 1)
    assert kept["message"] == "kept"


PROGRAM = """
import sys
from outrider.telemetry import exit_cleanly, guard_output, set_up_logging
from outrider.errors import ConfigError
guard_output()
set_up_logging(service="draft")
import logging
for _ in range(5000):
    logging.getLogger("outrider").warning("y" * 500)
with exit_cleanly():
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("raise ConfigError('port', 'in use')", 1), ("raise ValueError('a bug')", 1)]
)
@pytest.mark.parametrize("output", ["full", "closed pipe", "stalled pipe", "closed"])
def test_a_process_ends_as_it_would_with_any_output(output: str, ending: str, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM.format(ending=ending)]
    if output == "full":
        with Path("/dev/full").open("wb") as full:
            assert subprocess.run(command, stdout=full, stderr=full, timeout=DEADLINE_S, check=False).returncode == code
        return
    if output == "closed":
        closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
        assert subprocess.run(closed, timeout=DEADLINE_S, check=False).returncode == code
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        if output == "closed pipe":
            process.stdout.close()
        assert process.wait(DEADLINE_S) == code


def test_no_file_gets_the_number_of_a_closed_standard_stream() -> None:
    """A child's standard streams would take its place: the link secret of `outrider serve` is such a file."""
    program = "import os; from outrider.telemetry import guard_output; guard_output(); os._exit(os.memfd_create('x'))"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(closed, timeout=DEADLINE_S, check=False).returncode > 2


@pytest.mark.parametrize("module", ["outrider_coordinator", "outrider_draft"])
def test_grpc_adds_no_line_of_its_own_to_a_log(module: str) -> None:
    """Line of its own that gRPC would write when a port is taken."""
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    more = {"outrider_coordinator": ("--target-address", "127.0.0.1:1"), "outrider_draft": ("--method", "ngram")}[
        module
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", module, "--port", str(taken.getsockname()[1]), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment)
    assert done.returncode == 1
    *records, error = done.stderr.splitlines()
    assert "is in use" in error
    for record in records:
        json.loads(record)
