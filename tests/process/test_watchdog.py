"""The watchdog of a process: parts that hang, and how the process ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from outrider.process import watchdog as watchdog_module
from outrider.process.watchdog import LoopPing, Watchdog
from outrider.stalls import NO_STALL, Stall

DEADLINE_S = 240.0
HANG = Stall(11.0, 10.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "LOOK_INTERVAL_S", 0.01)


class Part:
    def __init__(self, *stalls: Stall) -> None:
        """The last one for ever."""
        self._stalls = list(stalls)
        self.num_looks = 0

    def look(self) -> Stall:
        self.num_looks += 1
        return self._stalls.pop(0) if len(self._stalls) > 1 else self._stalls[0]


def made(parts: dict[str, Callable[[], Stall]], reasons: list[str], ended: threading.Event) -> Watchdog:
    return Watchdog(parts, timeout_s=10.0, on_hang=reasons.append, grace_s=0.0, end=ended.set)


def test_a_part_that_hangs_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    reasons: list[str] = []
    ended = threading.Event()
    sound, hung = Part(NO_STALL), Part(NO_STALL, Stall(9.5, 10.0), HANG)
    watchdog = made({"the event loop": sound.look, "the engine": hung.look}, reasons, ended)
    watchdog.start()
    assert ended.wait(DEADLINE_S)
    watchdog.stop()
    assert hung.num_looks == 3
    assert reasons == ["the engine has made no progress for 11 s: the process ends"]
    stacks = capfd.readouterr().err
    assert "test_a_part_that_hangs_ends_the_process" in stacks  # this thread's too


def test_a_hang_that_cannot_be_told_ends_the_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_hang(reason: str) -> None:
        raise RuntimeError("the event loop is closed")

    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    ended = threading.Event()
    watchdog = Watchdog({"it": lambda: HANG}, timeout_s=10.0, on_hang=on_hang, grace_s=0.0, end=ended.set)
    watchdog.start()
    assert ended.wait(DEADLINE_S)
    watchdog.stop()


def test_parts_with_progress_go_on() -> None:
    ended = threading.Event()
    part = Part(NO_STALL, Stall(9.9, 10.0), Stall(100.0, 0.0), Stall(100.0, 200.0), NO_STALL)
    watchdog = made({"the engine": part.look}, [], ended)
    watchdog.start()
    while part.num_looks < 10:
        assert not ended.wait(0.01)
    watchdog.stop()
    assert not ended.is_set()


def test_without_a_timeout_nothing_is_watched() -> None:
    part = Part(HANG)
    watchdog = Watchdog({"the engine": part.look}, timeout_s=0.0, end=pytest.fail)
    watchdog.start()
    watchdog.stop()
    assert part.num_looks == 0


async def test_a_loop_that_answers_has_no_stall() -> None:
    ping = LoopPing(asyncio.get_running_loop(), 10.0)
    for _ in range(3):
        ping.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ping.look().age_s == 0.0


async def test_a_blocked_loop_is_a_stall() -> None:
    ping = LoopPing(asyncio.get_running_loop(), 0.01)
    is_found = threading.Event()

    def look() -> None:
        while not ping.look().is_hang:
            pass
        is_found.set()

    threading.Thread(target=look, daemon=True).start()
    assert is_found.wait(DEADLINE_S)  # blocks this loop meanwhile


IN_A_LOOP = """
import asyncio, ctypes, time
from outrider.process import watchdog
watchdog.LOOK_INTERVAL_S = 0.01
watchdog.LOCKED_FACTOR = 2.0

async def main():
    with watchdog.loop_watched(2.0):
        await asyncio.sleep(0.1)
        {hang}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("hang", "said"),
    [
        pytest.param("time.sleep(1000)", "the event loop has made no progress", id="without the interpreter lock"),
        pytest.param("ctypes.PyDLL(None).sleep(1000)", "Timeout", id="with the interpreter lock"),
    ],
)
def test_a_process_whose_loop_hangs_ends_with_its_stacks(hang: str, said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_LOOP.format(hang=hang)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "in main" in ended.stderr
