"""One child process: tied to its parent, read line by line, stopped with SIGTERM and then SIGKILL.

Its pipe is always read to the end, because a process with a full pipe blocks.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

from outrider.cli.stack.plan import ServiceSpec
from outrider.telemetry.output import ERROR_PREFIX

_log = logging.getLogger(__name__)

_KEPT_LINES = 100
"""Last lines of output that an error message can show."""
_CHUNK_BYTES = 64 << 10
_LINE_LIMIT_BYTES = 1 << 20
"""A longer line is cut into pieces."""
_LAST_OUTPUT_TIMEOUT_S = 1.0
"""Time for reading the pipe after the process's end: a process that it started may hold the other end."""


class ChildProcess:
    """A running service. Its recent output is kept and passed to ``on_line``."""

    def __init__(self, spec: ServiceSpec, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self.spec = spec
        self._process = process
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._reader = asyncio.create_task(self._read(on_line))

    @classmethod
    async def start(cls, spec: ServiceSpec, on_line: Callable[[str], None]) -> ChildProcess:
        """Start it in its own process group, so that an interrupt at the terminal is passed on in order."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder of the user's own that is named like a module of ours is not run
            *("-m", "outrider.cli.stack.child", str(os.getpid()), spec.module, *spec.argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_environment(),
            process_group=0,
            pass_fds=spec.inherited,
        )
        return cls(spec, process, on_line)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True if it has ended."""
        return self._process.returncode is not None

    async def wait(self) -> str:
        """Wait for its end and describe it."""
        await self._process.wait()
        # The reading goes on when it takes longer, or when this call is cancelled.
        await asyncio.wait([self._reader], timeout=_LAST_OUTPUT_TIMEOUT_S)
        return self._ending()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after a timeout."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), self.spec.stop_within_s)
        except TimeoutError:
            self.kill()
        await self.wait()

    def kill(self) -> None:
        """Send SIGKILL."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _read(self, on_line: Callable[[str], None]) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        async for raw in _lines(stream):
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            try:
                on_line(line)
            except (Exception, SystemExit):  # a console of rich's exits when its reader has gone
                _log.debug("a line of the %s service was not shown", self.spec.name, exc_info=True)

    def _ending(self) -> str:
        code = self._process.returncode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = self.spec.as_typed(last_error(list(self._lines)))
        return f"{reason} ({how})" if reason else how


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines until the pipe's end; one without an end in sight is given in pieces."""
    pending = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(pending) > _LINE_LIMIT_BYTES:
            yield pending
            pending = b""
    if pending:
        yield pending


def last_error(lines: list[str]) -> str:
    """The reason for the end: the error line, the last logged error, or the last line."""
    for line in reversed(lines):
        if line.startswith(ERROR_PREFIX):
            return line.removeprefix(ERROR_PREFIX)
    for line in reversed(lines):
        if message := _logged_error(line):
            return message
    plain = [line for line in lines if line and not line.startswith("{")]
    return plain[-1] if plain else ""


def _logged_error(line: str) -> str:
    if not line.startswith("{"):
        return ""
    try:
        record = json.loads(line)
    except ValueError:
        return ""
    return str(record.get("message", "")) if record.get("level") in {"error", "critical"} else ""


def _environment() -> dict[str, str]:
    """Ours without the settings, which the flags say in full, and with output that is not held back."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_")}
    # The models take turns; threads that spin while they wait for work take the cores from the one whose turn it is.
    return {"OMP_WAIT_POLICY": "PASSIVE", **kept, "PYTHONUNBUFFERED": "1"}
