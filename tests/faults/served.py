"""A stack under `outrider serve`, whose own output can not be written."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from outrider.cli.stack.held_ports import HeldPort
from tests.faults.processes import MODULES, Process, as_flags, without_settings
from tests.faults.stack import NUM_PAGES, PAIR, Stack
from tests.support.processes import arguments, children, is_alive

_STOP_DEADLINE_S = 240.0


class Output(enum.StrEnum):
    """Destination of the output of `outrider serve`."""

    WRITTEN = "written"
    CLOSED_PIPE = "closed pipe"
    """Pipe whose reader goes away when the stack is whole."""
    STALLED_PIPE = "stalled pipe"
    """Pipe whose reader stops reading when the stack is whole."""
    FULL_DISK = "full disk"
    """Log that cannot grow any more when the stack is whole."""


class ServedProcess(Process):
    """A service that `outrider serve` starts and restarts, found by its parent."""

    def __init__(self, role: str, serve: subprocess.Popen[bytes], *, port: int, metrics_port: int) -> None:
        super().__init__(f"{role}-0", port=port, metrics_port=metrics_port)
        self._serve, self._module = serve, MODULES[role]
        self._seen: list[int] = []
        self._num_kills = 0

    @property
    def pid(self) -> int | None:
        """The child of `outrider serve` that runs this service's module."""
        found = next((pid for pid in children(self._serve.pid) if self._module in arguments(pid)), None)
        if found is not None and found not in self._seen:
            self._seen.append(found)
        return found

    @property
    def crashes(self) -> list[str]:
        """Ends that no fault asked for."""
        unasked = len(self._seen) - 1 - self._num_kills
        return [f"{self.name} ended {unasked} times by itself"] if unasked > 0 else []

    def kill(self) -> None:
        """SIGKILL; `outrider serve` starts it again."""
        self._num_kills += self.pid is not None
        super().kill()

    def hang(self, *, is_rank: bool = False) -> None:
        """Hang of the process's work; it ends itself, and `outrider serve` starts it again."""
        self._num_kills += self.pid is not None
        super().hang(is_rank=is_rank)


class ServedStack(Stack):
    """The three services of one `outrider serve`, and the command itself."""

    def __init__(self, serve: subprocess.Popen[bytes], ports: dict[str, tuple[int, int]]) -> None:
        made = {role: ServedProcess(role, serve, port=port, metrics_port=at) for role, (port, at) in ports.items()}
        super().__init__([made["target"]], [made["draft"]], [made["coordinator"]], {})
        self._serve = serve

    @property
    def is_over(self) -> bool:
        """True if the command itself has ended."""
        return self._serve.poll() is not None

    async def terminate(self) -> tuple[int | None, int]:
        """SIGTERM; the exit code (None: it had to be killed) and how many of its processes were left."""
        pids = children(self._serve.pid)
        self._serve.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._serve.wait), _STOP_DEADLINE_S)
        return self._serve.poll(), sum(is_alive(pid) for pid in pids)


@contextlib.asynccontextmanager
async def run_served(output: Output) -> AsyncIterator[ServedStack]:
    """`outrider serve` on the embedded pair with an output of this kind; whole inside, gone outside."""
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder:
        log = Path(folder) / "serve.log"
        reading, writing = os.pipe()
        reader = os.fdopen(reading, "rb")
        held = {role: (HeldPort(), HeldPort()) for role in MODULES}
        ports = {role: (port.number, metrics_port.number) for role, (port, metrics_port) in held.items()}
        with log.open("wb") as file:
            serve = subprocess.Popen(
                # Tied to this process's life, as the services are to the command's.
                [
                    *(sys.executable, "-m", "outrider.cli.stack.child", str(os.getpid())),
                    *("outrider.cli", "serve", *_arguments(ports)),
                ],
                stdin=subprocess.PIPE,
                stdout=file if output in {Output.WRITTEN, Output.FULL_DISK} else writing,
                stderr=subprocess.STDOUT,
                env=without_settings(),
                start_new_session=True,
            )
        os.close(writing)
        stack = ServedStack(serve, ports)
        try:
            await stack.whole()
            if output is Output.FULL_DISK:
                _fill_disk(serve.pid, log)
            if output is Output.CLOSED_PIPE:
                reader.close()
            yield stack
        finally:
            serve.kill()
            serve.communicate()
            reader.close()
            for port in (port for pair in held.values() for port in pair):
                port.close()


def _fill_disk(pid: int, log: Path) -> None:
    """Keep the process's files from growing beyond what its log has."""
    size = log.stat().st_size
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))


def _arguments(ports: dict[str, tuple[int, int]]) -> list[str]:
    settings = {
        f"{role}.{key}": value for role, pair in ports.items() for key, value in zip(_PORT_KEYS, pair, strict=True)
    }
    settings |= {"target.num_pages": NUM_PAGES, "draft.num_pages": NUM_PAGES}
    flags = as_flags({"draft_model": PAIR / "draft", "num_threads": 1, "log_level": "debug"})
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [str(PAIR / "target"), "-v", "--no-http", *flags, *sets]


_PORT_KEYS = ("port", "metrics_port")
