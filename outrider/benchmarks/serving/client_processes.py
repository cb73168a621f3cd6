"""Client processes: one load, sent by several processes, so that the client is not what limits a measurement.

Owns the processes. All start a run at the same reading of the monotonic clock, which processes of a host share, and
send back their records whole; `join` puts them together.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Self, TypeAlias

from outrider.benchmarks.serving.load import Decoding, Share, divide, join, send, users_of
from outrider.benchmarks.serving.records import Record, Run
from outrider.benchmarks.serving.workload import Prompt, Traffic
from outrider.client import AsyncClient
from outrider.errors import OutriderError, UnavailableError

_START_DELAY_S = 0.02
"""Delay from the moment at which all processes are ready to the start of the run."""
_END_WITHIN_S = 5.0

Sent: TypeAlias = tuple[list[Record], float]
"""Records of a share, and the processor time that its process spent, in seconds."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """One process and the connection to it."""

    process: SpawnProcess
    connection: Connection

    def ask(self, message: object) -> object:
        """Send a message and wait for its answer; ``UnavailableError`` if the process ended or its client failed."""
        try:
            self.connection.send(message)
        except OSError as error:
            raise self._ended() from error
        return self.answer()

    def answer(self) -> object:
        """Wait for what it says next; raises as ``ask`` does."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(answer, OutriderError):
            raise answer
        return answer

    def _ended(self) -> UnavailableError:
        self.process.join(_END_WITHIN_S)
        return UnavailableError(f"a client process ended with exit code {self.process.exitcode}")


class ClientProcesses:
    """Processes with a client each, all of the coordinator at ``address``; a context manager.

    ``tls`` is that of `AsyncClient`.
    """

    def __init__(self, address: str, num_processes: int, *, tls: bool | None = None) -> None:
        self._address = address
        self._num_processes = num_processes
        self._tls = tls
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(num_processes)
        """One waits for each process."""

    async def __aenter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._num_processes):
            here, there = context.Pipe()
            process = context.Process(target=_run_worker, args=(there, self._address, self._tls), daemon=True)
            process.start()
            there.close()
            self._workers.append(_Worker(process, here))
        await asyncio.gather(*map(self._wait_for_start, self._workers))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            await asyncio.to_thread(worker.process.join, _END_WITHIN_S if kind is None else 0)
            worker.process.terminate()
        self._workers.clear()
        self._threads.shutdown(wait=False)

    async def run_load(
        self,
        prompts: Sequence[Prompt],
        traffic: Traffic,
        decoding: Decoding,
        *,
        on_done: Callable[[], None] = lambda: None,
    ) -> Run:
        """Send every prompt when it is due; the users are divided among the processes.

        ``on_done`` is called for all requests of a process when the last of them has ended.
        """
        shares = divide(prompts, traffic, decoding, len(self._workers))
        workers = self._workers[: len(shares)]
        await asyncio.gather(*(self._ask(worker, share) for worker, share in zip(workers, shares, strict=True)))
        began = time.perf_counter() + _START_DELAY_S

        async def sent(worker: _Worker) -> Sent:
            answer = await self._ask(worker, began)
            if not isinstance(answer, tuple):
                raise TypeError(f"a client process answered with {type(answer).__name__}")
            for _ in answer[0]:
                on_done()
            return answer

        answers = await asyncio.gather(*map(sent, workers))
        parts = [(share, *answer) for share, answer in zip(shares, answers, strict=True)]
        return join(parts, users_of(prompts, traffic))

    async def _wait_for_start(self, worker: _Worker) -> None:
        """Processes that start take the processors from the services: nothing is to be measured meanwhile."""
        await asyncio.get_running_loop().run_in_executor(self._threads, worker.answer)

    async def _ask(self, worker: _Worker, message: object) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._threads, worker.ask, message)


def _run_worker(connection: Connection, address: str, tls: bool | None) -> None:
    """Serve runs until the other end closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the connection
    asyncio.run(_serve(connection, address, tls=tls))


async def _serve(connection: Connection, address: str, *, tls: bool | None) -> None:
    async with AsyncClient(address, tls=tls) as client:
        connection.send(None)
        while True:
            try:
                share: Share = connection.recv()
                connection.send(await _connect(client))
                began: float = connection.recv()
            except EOFError:
                return
            processor = time.process_time()
            records = await send(client, share, began)
            connection.send((records, time.process_time() - processor))


async def _connect(client: AsyncClient) -> OutriderError | None:
    """Connect before the run, so that its first requests do not wait for it; returns what went wrong."""
    try:
        await client.model_info()
    except OutriderError as error:
        return error
    return None
