"""A processor is kept busy while there is work, by a program that yields to all others and ends with its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.process.cpu_affinity import keeper as keeping
from outrider.process.cpu_affinity.choice import ClaimedProcessors
from outrider.process.cpu_affinity.keeper import pinned_to_cpus
from tests.support.processes import arguments, children, processor_ticks, state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CPUs are pinned on Linux alone")

DEADLINE_S = 240.0


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> int:
    """The one that is taken, whoever else runs tests on this host."""
    chosen = max(os.sched_getaffinity(0))
    monkeypatch.setattr(keeping, "take", lambda count: ClaimedProcessors((chosen,)[:count], ()))
    return chosen


def _children() -> list[int]:
    """Processes of this one that poll a CPU busily."""
    return [child for child in children(os.getpid()) if any("spinner.py" in word for word in arguments(child))]


async def _the_child() -> int:
    """Child, which may still be about to execute its program."""
    await _until(lambda: len(_children()) == 1)
    return _children()[0]


async def _until_it_spins(child: int) -> None:
    """Return once it has used 10 ms of the processor without sleeping, which takes half a minute at load 20."""
    num_sleeps, ticks = _num_sleeps(child), processor_ticks(child)
    deadline = time.monotonic() + DEADLINE_S
    while processor_ticks(child) == ticks:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
        if _num_sleeps(child) != num_sleeps:
            num_sleeps, ticks = _num_sleeps(child), processor_ticks(child)


def _num_sleeps(child: int) -> str:
    status = Path(f"/proc/{child}/status").read_text(encoding="utf-8")
    return next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_threads_stay_on_the_processor_and_are_let_go_afterwards(processor: int) -> None:
    before = os.sched_getaffinity(0)
    async with pinned_to_cpus(1, lambda: False) as processors:
        assert processors == (processor,)
        affinities = []
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                affinities.append(os.sched_getaffinity(int(thread.name)))
        assert affinities == [{processor}] * len(affinities)
    assert os.sched_getaffinity(0) == before


async def test_it_burns_time_only_while_there_is_work_and_with_the_lowest_priority(processor: int) -> None:
    is_busy = asyncio.Event()
    async with pinned_to_cpus(1, is_busy.is_set):
        child = await _the_child()
        await _until(lambda: os.sched_getscheduler(child) == os.SCHED_IDLE)
        await _until(lambda: os.sched_getaffinity(child) == {processor})
        await _until(lambda: _is_asleep(child))
        is_busy.set()
        await _until_it_spins(child)
        is_busy.clear()
        await _until(lambda: _is_asleep(child))
    assert _children() == []


def _is_asleep(child: int) -> bool:
    """True if it waits in a read."""
    return state(child) == "S"


async def test_a_program_that_was_killed_is_told_of_and_missed_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with pinned_to_cpus(1, lambda: True):
        child = await _the_child()
        os.kill(child, signal.SIGKILL)
        await _until(lambda: "have ended" in caplog.text)


async def test_more_than_the_process_may_run_on_is_refused() -> None:
    count = len(os.sched_getaffinity(0)) + 1
    with pytest.raises(ConfigError, match=f"num_pinned_cpus: is {count}, and this process may run on"):
        async with pinned_to_cpus(count, lambda: True):
            pass


async def test_processors_that_others_have_taken_are_left_to_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeping, "take", lambda _: ClaimedProcessors((), ()))
    before = os.sched_getaffinity(0)
    async with pinned_to_cpus(1, lambda: True) as processors:
        assert processors == ()
        assert os.sched_getaffinity(0) == before
    assert "of 1 CPUs wanted, 0 are not taken by others" in caplog.text


async def test_where_threads_may_not_be_moved_everything_else_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    async with pinned_to_cpus(1, lambda: True) as processors:
        assert processors == ()
        assert _children() == []
    assert "cannot be pinned to CPUs" in caplog.text


async def test_where_no_program_can_be_started_everything_else_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = os.sched_getaffinity(0)
    async with pinned_to_cpus(1, lambda: True) as processors:
        assert processors == ()
        assert os.sched_getaffinity(0) == before
    assert "cannot be pinned to CPUs" in caplog.text


@pytest.mark.parametrize("count", [0, None])
async def test_nothing_is_started_where_nothing_is_wanted(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr(keeping, "automatic_count", lambda: 0)
    async with contextlib.AsyncExitStack() as stack:
        assert await stack.enter_async_context(pinned_to_cpus(count, lambda: True)) == ()
        assert _children() == []
