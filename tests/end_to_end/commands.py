"""`outrider serve` as a user runs it: a process of its own, with three more below it, and a gateway if asked for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from outrider import Client
from outrider.cli.stack.held_ports import hold_port
from tests.support.processes import arguments, children

DEADLINE_S = 240.0
"""Generous: a start imports torch twice, on a machine that may be busy with other tests."""
PATIENT = ("--set", "coordinator.draft_timeout_ms=60000")
"""Flags with which a draft on a busy machine is waited for."""
_CHILD = "outrider.cli.stack.child"
SERVICES = {"outrider_target", "outrider_draft", "outrider_coordinator"}


class Command:
    """`outrider serve` with these arguments; what it writes is read as it comes."""

    def __init__(
        self,
        *arguments: str,
        port: int | None = None,
        http_port: int | None = None,
        environment: dict[str, str] | None = None,
        closes_output_when_ready: bool = False,
    ) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "outrider.cli", "serve", *arguments),
                *("--port", str(port or hold_port()), "--num-threads", "1"),
                *(("--http-port", str(http_port)) if http_port else ("--no-http",)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.out: list[str] = []
        self.err: list[str] = []
        read = self._read_until_ready if closes_output_when_ready else list.extend
        self._readers = [
            threading.Thread(target=read, args=(lines, stream), daemon=True)
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _read_until_ready(self, lines: list[str], stream: IO[str]) -> None:
        """Read up to the line that follows the ready line, then be gone."""
        with stream:
            for line in stream:
                lines.append(line)
                if self.out:
                    return

    def address(self) -> str:
        """Address that it serves at, once it prints it."""
        wait_until(lambda: self.out or self.process.poll() is not None, "the ready line", self.err)
        found = re.fullmatch(r"Outrider is ready at (\S+)\n", self.out[0]) if self.out else None
        assert found, (self.out, self.err)
        return found[1]

    def attached(self, **options: Any) -> str:
        """Address, once its coordinator has the draft: it serves without one that was not reached at once."""
        with Client(address := self.address(), **options) as client:
            wait_until(lambda: client.model_info().draft_attached, "the draft attached", self.err)
        return address

    def children(self) -> dict[str, int]:
        """The services' processes by module."""
        words = {pid: arguments(pid) for pid in children(self.process.pid)}
        at = {pid: found.index(_CHILD) for pid, found in words.items() if _CHILD in found}
        return {words[pid][place + 2]: pid for pid, place in at.items()}

    def address_of(self, module: str) -> str:
        """Address of a service below it."""
        words = arguments(self.children()[module])
        return f"127.0.0.1:{words[words.index('--port') + 1]}"

    def terminate(self) -> None:
        """Ask it to stop, as Ctrl-C or an orchestrator does."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> tuple[int, list[str]]:
        """Exit code, and all that it wrote to standard error."""
        code = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(DEADLINE_S)
        return code, self.err

    def close(self) -> None:
        """Kill it, and with it its children."""
        self.process.kill()
        self.process.wait()


def wait_until(condition: Callable[[], object], what: str, said: object = None, *, every_s: float = 0.05) -> None:
    """Return soon after the condition holds; an error that names it when the deadline is past.

    Conditions ask services or read all of /proc, which takes milliseconds.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, (f"did not come about: {what}", said)
        time.sleep(every_s)
