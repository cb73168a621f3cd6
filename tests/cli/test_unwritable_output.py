"""``outrider serve`` supervises on when nobody can be told: real processes, outputs that cannot be written."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.processes import arguments, children

DEADLINE_S = 240.0
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
NAMES = ("coordinator", "draft", "target")
pytestmark = pytest.mark.integration


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)


class Served:
    """A running ``serve`` and the notes that its services write elsewhere."""

    def __init__(self, process: subprocess.Popen[bytes], notes: Path) -> None:
        self.process, self._notes = process, notes

    def num_notes(self, line: str) -> int:
        return self._notes.read_text().splitlines().count(line) if self._notes.exists() else 0

    def until_noted(self, line: str, times: int = 1) -> None:
        until(lambda: self.num_notes(line) >= times, f"{line} for the {times}. time")

    def pid_of(self, name: str) -> int:
        def pids() -> list[int]:
            return [pid for pid in children(self.process.pid) if ("--name", name) in itertools.pairwise(arguments(pid))]

        until(pids, f"a process of the {name}")
        return pids()[0]

    def kill_and_await(self, name: str, times: int) -> None:
        os.kill(self.pid_of(name), signal.SIGKILL)
        self.until_noted(f"{name} up", times)
        assert self.process.poll() is None

    def limit_files(self, limit: tuple[int, int]) -> None:
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limit)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


@contextmanager
def serving(folder: Path, output: int | IO[Any], *arguments: str, verbose: int = 0) -> Iterator[Served]:
    notes = folder / "notes"
    command = [sys.executable, "-m", "tests.cli.serve_stand_ins", str(verbose), str(notes), *arguments]
    with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            served = Served(process, notes)
            served.until_noted("ready")
            yield served
        finally:
            process.kill()


def end_politely(served: Served) -> None:
    assert served.end() == 0
    assert all(served.num_notes(f"{name} down") == 1 for name in NAMES)


def test_a_full_disk_ends_no_supervision_and_what_was_dropped_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file, serving(tmp_path, file) as served:
        until(lambda: "ready" in log.read_text(), "the line on standard output")
        served.limit_files((1, resource.RLIM_INFINITY))
        served.kill_and_await("draft", 2)
        served.kill_and_await("target", 2)
        served.kill_and_await("draft", 3)
        assert "ended" not in log.read_text()
        served.limit_files(UNLIMITED)
        until(lambda: "dropped while this output could not be written" in log.read_text(), "the count of what was lost")
        served.kill_and_await("target", 3)
        until(lambda: "target: ended: killed by SIGKILL" in log.read_text(), "what happened afterwards")
        end_politely(served)


def test_a_reader_that_has_gone_ends_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, subprocess.PIPE) as served:
        assert served.process.stdout is not None
        served.process.stdout.close()
        served.kill_and_await("draft", 2)
        served.kill_and_await("draft", 3)
        end_politely(served)


def test_a_full_device_from_the_start(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full, serving(tmp_path, full) as served:
        served.kill_and_await("draft", 2)
        end_politely(served)


@pytest.mark.parametrize("verbose", [0, 2])
def test_no_service_blocks_on_its_log_when_nobody_reads_ours(tmp_path: Path, verbose: int) -> None:
    """4 MB a service, far more than all pipes and queues hold."""
    with serving(tmp_path, subprocess.PIPE, "--chatter", "5000", verbose=verbose) as served:
        for name in NAMES:
            served.until_noted(f"{name} has chattered")
        served.kill_and_await("draft", 2)
        served.until_noted("draft has chattered", 2)
        assert served.process.stdout is not None
        end_politely(served)
        said = served.process.stdout.read().decode()
        assert "chatter" in said


def test_services_keep_writing_while_the_disk_is_full(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file, serving(tmp_path, file, "--chatter", "5000") as served:
        served.limit_files((1, resource.RLIM_INFINITY))
        served.until_noted("coordinator has chattered")
        served.kill_and_await("coordinator", 2)
        served.until_noted("coordinator has chattered", 2)
        end_politely(served)


def test_a_bug_in_the_supervision_ends_the_stack_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, subprocess.PIPE, "--bug") as served:
        os.kill(served.pid_of("draft"), signal.SIGKILL)
        output, _ = served.process.communicate(timeout=DEADLINE_S)
        assert served.process.returncode == 1
        assert "the supervision of the draft service ended: ValueError('a bug')" in output.decode()
        assert served.num_notes("coordinator down") == served.num_notes("target down") == 1
