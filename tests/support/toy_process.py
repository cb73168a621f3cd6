"""A toy draft or target in a process of its own, to be stopped, continued and killed.

``python -m tests.support.toy_process ROLE PORT LOAD_S`` listens, says so in one line, and serves after ``LOAD_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from outrider.cli.stack.held_ports import HeldPort
from outrider.process.hosting import PendingService
from outrider.transport.server import serve_draft, serve_target
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows

VOCAB_SIZE = 9
ROWS = random_rows(VOCAB_SIZE, seed=1)
START_DEADLINE_S = 240.0


class ToyProcess:
    """One process, known by its address."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port
        self.address = f"127.0.0.1:{port}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        """Return when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def says(self, line: str) -> None:
        """Read its output until this line."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_DEADLINE_S):
            while said := (await self.process.stdout.readline()).decode():
                if said.strip() == line:
                    return
        raise AssertionError(f"the process ended before it said {line!r}")


@contextlib.asynccontextmanager
async def toy_process(
    role: str, *, port: int = 0, load_s: float = 0.0, is_awaited: bool = True
) -> AsyncIterator[ToyProcess]:
    """A process of its own; killed at the end. It serves already, unless ``is_awaited`` is False."""
    held = HeldPort()
    command = [sys.executable, "-m", "tests.support.toy_process", role, str(port or held.number), str(load_s)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_DEADLINE_S):
            port = int((await process.stdout.readline()).decode().removeprefix("listening "))
        toy = ToyProcess(process, port)
        if is_awaited:
            await toy.says("serving")
        yield toy
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()
        held.close()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _serve(role: str, port: int, load_s: float) -> None:
    pending: PendingService[Any, Any] = PendingService()
    serve: Any = {"draft": serve_draft, "target": serve_target}[role]
    server = await serve(pending, host="127.0.0.1", port=port)
    _say(f"listening {server.address.rpartition(':')[2]}")
    await asyncio.sleep(load_s)
    toy: Any = {"draft": ToyDraft, "target": ToyTarget}[role](ROWS, VOCAB_SIZE)
    pending.loaded = toy
    await server.set_serving(True)
    _say("serving")
    await server.wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
