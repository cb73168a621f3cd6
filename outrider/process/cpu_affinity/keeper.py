"""CPU pinning of a process, and busy polling of its CPUs while it has work. Linux only; no effect elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

from outrider.errors import ConfigError
from outrider.process.cpu_affinity import spinner
from outrider.process.cpu_affinity.choice import automatic_count, take

_log = logging.getLogger(__name__)

SETTING = "num_pinned_cpus"
_END_S = 1.0
"""Longest wait for the polling process to end."""
_LOOK_S = 0.05
"""Interval of the checks for work; a quarter of the time that a CPU is polled without a byte."""


@contextlib.asynccontextmanager
async def pinned_to_cpus(count: int | None, is_busy: Callable[[], bool]) -> AsyncIterator[tuple[int, ...]]:
    """Pin the threads of this process to ``count`` CPUs, polled busily while ``is_busy``; yields their numbers.

    None: ``automatic_count``. ``ConfigError`` if the process may not run on as many.
    """
    wanted = automatic_count() if count is None else count
    if not wanted or sys.platform != "linux":
        yield ()
        return
    allowed = os.sched_getaffinity(0)
    if wanted > len(allowed):
        raise ConfigError(SETTING, f"is {wanted}, and this process may run on {len(allowed)}")
    taken = take(wanted)
    spinners = _begin(taken.processors, wanted, allowed)
    if spinners is None:
        taken.give_back()
        yield ()
        return
    notifier = asyncio.create_task(_tell(spinners, is_busy))
    try:
        yield taken.processors
    finally:
        notifier.cancel()
        _end(spinners, allowed)
        taken.give_back()


def _begin(processors: Sequence[int], wanted: int, allowed: Collection[int]) -> list[subprocess.Popen[bytes]] | None:
    """Pin the threads and start busy polling; None, and nothing changed, where that fails."""
    if len(processors) < wanted:
        _log.warning("CPU pinning: of %d CPUs wanted, %d are not taken by others", wanted, len(processors))
        return None
    spinners: list[subprocess.Popen[bytes]] = []
    listed = ", ".join(map(str, processors))
    try:
        _stay_on(processors)
        spinners += map(_start, processors)
    except OSError as error:
        _log.warning("CPU pinning: this process cannot be pinned to CPUs %s: %s", listed, error)
        _end(spinners, allowed)
        return None
    _log.info("pinned to CPUs %s, which are busy-polled while there is work", listed)
    return spinners


def _end(spinners: Sequence[subprocess.Popen[bytes]], allowed: Collection[int]) -> None:
    with contextlib.suppress(OSError):  # what was allowed may not be any more
        _stay_on(allowed)
    for spinning in spinners:
        if spinning.stdin is not None:
            spinning.stdin.close()  # with which it ends
        try:
            spinning.wait(_END_S)
        except subprocess.TimeoutExpired:
            spinning.kill()
            spinning.wait()


def _start(processor: int) -> subprocess.Popen[bytes]:
    spinning = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(spinner.__file__)), str(processor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
    )
    if spinning.stdin is not None:
        os.set_blocking(spinning.stdin.fileno(), False)  # a stopped child must not block this process
    return spinning


def _stay_on(processors: Collection[int]) -> None:
    """All threads there are; later ones inherit it."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), processors)


async def _tell(spinners: Sequence[subprocess.Popen[bytes]], is_busy: Callable[[], bool]) -> None:
    running = list(spinners)
    while running:
        await asyncio.sleep(_LOOK_S)
        if is_busy():
            running = [spinning for spinning in running if _tell_one(spinning)]
    _log.warning("CPU pinning: the processes that polled have ended, so CPUs may idle")


def _tell_one(spinning: subprocess.Popen[bytes]) -> bool:
    """True if it still listens."""
    try:
        if spinning.stdin is not None:
            spinning.stdin.write(b".")
    except OSError:
        return False
    return True
