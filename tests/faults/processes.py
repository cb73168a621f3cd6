"""One service as a real process at fixed ports, started again whenever it ends, as an orchestrator would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from outrider.cli.stack.held_ports import HeldPort
from outrider.cli.stack.probe import is_serving
from tests.faults.readings import Metrics, Usage, metrics_of, usage_of
from tests.support.processes import arguments, children

RESTART_DELAY_S = 0.5
"""Pause between a process's end and its next start; what `outrider serve` waits the first time."""
MODULES = {"target": "outrider_target", "draft": "outrider_draft", "coordinator": "outrider_coordinator"}
START_DEADLINE_S = 240.0
"""Generous: a start imports torch, on a machine that may be busy."""
END_DEADLINE_S = 240.0
"""Deadline for a process that hangs; its limit is 10 s on a machine that is not busy."""
_POLL_S = 0.05

_SHOWN_LINES = 10

Say = Callable[[str], None]


class Process:
    """A service of a stack as faults and readings see it; who starts it is a subclass's."""

    def __init__(self, name: str, *, port: int, metrics_port: int) -> None:
        self.name, self.port, self.metrics_port = name, port, metrics_port

    @property
    def address(self) -> str:
        """Address that it listens at."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process's number; None while there is none."""
        raise NotImplementedError

    @property
    def crashes(self) -> list[str]:
        """Ends that no fault asked for."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL; somebody starts it again."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def hang(self, *, is_rank: bool = False) -> None:
        """Hang of the process's work for good (``hang_hook``); its watchdog ends it. ``is_rank``: that of the
        second rank of its model.
        """
        found = children(self.pid) if is_rank and self.pid is not None else ()
        ranks = [pid for pid in found if set(MODULES.values()) & set(arguments(pid))]  # others poll CPUs busily
        self._signal(signal.SIGUSR1, ranks[0] if ranks else None)

    async def replaced(self, pid: int | None) -> None:
        """Return when the process of that number has ended; ``AssertionError`` when it takes too long."""
        deadline = time.monotonic() + END_DEADLINE_S
        while pid is not None and self.pid == pid:
            assert time.monotonic() < deadline, f"{self.name} hangs and does not end:\n{self.last_lines()}"
            await asyncio.sleep(_POLL_S)

    async def running(self) -> None:
        """Return when there is a process, whether it serves yet or not."""
        while self.pid is None:
            await asyncio.sleep(_POLL_S)

    async def serving(self) -> None:
        """Return when it serves; ``AssertionError`` with the end of its log when it takes too long."""
        deadline = time.monotonic() + START_DEADLINE_S
        while self.pid is None or not await is_serving(self.address, waits=True):
            assert time.monotonic() < deadline, f"{self.name} does not serve:\n{self.last_lines()}"
            await asyncio.sleep(_POLL_S)

    async def metrics(self) -> Metrics | None:
        """Metrics of the process; None when it does not answer."""
        return await metrics_of(self.metrics_port)

    def usage(self) -> Usage | None:
        """Memory, files and threads of the process; None while there is none."""
        pid = self.pid
        return None if pid is None else usage_of(pid)

    def last_lines(self) -> str:
        """The end of its log, where there is one."""
        return ""

    def _signal(self, number: signal.Signals, pid: int | None = None) -> None:
        pid = pid or self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class ServiceProcess(Process):
    """A target, draft or coordinator that this process starts, and starts again whenever it ends."""

    def __init__(self, name: str, module: str, flags: Mapping[str, object], *, folder: Path) -> None:
        self._held = (HeldPort(), HeldPort())
        port, metrics_port = (port.number for port in self._held)
        super().__init__(name, port=port, metrics_port=metrics_port)
        self.log = folder / f"{name}.log"
        self.command = [module, *as_flags({**flags, "port": self.port, "metrics-port": self.metrics_port})]
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._crashes: list[str] = []
        self._is_death_expected = self._is_kept = False

    @property
    def pid(self) -> int | None:
        """The process's number; None while there is none."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    @property
    def crashes(self) -> list[str]:
        """Ends that no fault asked for."""
        return self._crashes

    async def start(self) -> None:
        """Start it, and keep it started from now on."""
        await self._spawn()
        self._is_kept = True
        self._keeper = asyncio.create_task(self._keep())

    def kill(self) -> None:
        """SIGKILL; the process is started again after ``RESTART_DELAY_S``."""
        self._is_death_expected = self.pid is not None
        super().kill()

    def hang(self, *, is_rank: bool = False) -> None:
        """Hang of the process's work; it ends itself, and is started again."""
        self._is_death_expected = self.pid is not None
        super().hang(is_rank=is_rank)

    async def stop(self) -> None:
        """End it for good."""
        self._is_kept = False
        self._is_death_expected = True
        self._signal(signal.SIGKILL)
        if self._keeper is not None:
            await self._keeper
        for port in self._held:
            port.close()

    def last_lines(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
        return ""

    async def _spawn(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "outrider.cli.stack.child", str(os.getpid()), *self.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"OMP_WAIT_POLICY": "PASSIVE", **without_settings()},
                start_new_session=True,
            )

    async def _keep(self) -> None:
        while self._process is not None:
            code = await self._process.wait()
            if not self._is_death_expected:
                self._crashes.append(f"{self.name} ended by itself with {code}: {self.last_lines()}")
            self._is_death_expected = False
            if self._is_kept:
                await asyncio.sleep(RESTART_DELAY_S)
            if not self._is_kept:
                return
            await self._spawn()


def as_flags(flags: Mapping[str, object]) -> list[str]:
    """Settings as words of a command line."""
    return [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def without_settings() -> dict[str, str]:
    """The environment without Outrider's variables, and with the hook that lets a process hang."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_")}
    hook = str(Path(__file__).parent / "hang_hook")
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (hook, kept.get("PYTHONPATH"))))}
