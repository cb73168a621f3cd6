"""Large tensors on a real link, inline against shared memory.

A stand-in target in another process answers each `Score` with rows of a given size, through the servicer and the remote
port that the system runs on; a round trip ends when every page of the rows has been read.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from outrider import __version__
from outrider.batched import one_by_one
from outrider.benchmarks.child_process import child_process
from outrider.benchmarks.schema import Label, Series
from outrider.errors import ProtocolError
from outrider.ports import EventBatch, Score, Scores
from outrider.prefix_hash import chain_size
from outrider.process.hosting import run
from outrider.stalls import NO_STALL
from outrider.transport.remote import RemoteTarget
from outrider.transport.server import serve_target
from outrider.types import DenseScores, FloatArray, ModelDescription

INLINE, SHARED = "inline", "shared_memory"
_PAGE_VALUES = 1024


class _RowsLink:
    """A `ports.Link` that answers every `Score` with as many values as its base length says."""

    num_pages_free = None
    stall = NO_STALL

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[EventBatch[Any] | None] = asyncio.Queue()
        self._rows: FloatArray = np.zeros(0, dtype=np.float32)

    def send(self, commands: Sequence[Any]) -> None:
        """Answer at once."""
        for command in one_by_one(commands):
            if isinstance(command, Score):
                self._waiting.put_nowait(EventBatch((self._answer(command),)))

    async def events(self) -> AsyncIterator[EventBatch[Any]]:
        """The answers."""
        while (batch := await self._waiting.get()) is not None:
            yield batch

    async def close(self) -> None:
        """No more answers."""
        self._waiting.put_nowait(None)

    def _answer(self, command: Score) -> Scores:
        if self._rows.size != command.num_kept_tokens:
            self._rows = np.empty(command.num_kept_tokens, dtype=np.float32)
        self._rows[::_PAGE_VALUES] = command.generation % 1000
        return Scores(command.session, command.generation, command.num_kept_tokens, DenseScores(self._rows[None]))


class _RowsTarget:
    """`ports.Target` over such links."""

    async def describe(self) -> ModelDescription:
        """Next to nothing."""
        return ModelDescription("target", "rows", "", 1, 1, 1, version=__version__)

    async def attach(self) -> _RowsLink:
        """Open a link."""
        return _RowsLink()


async def measure(
    num_bytes: Sequence[int], *, num_samples: int, num_warmups: int, planes: Sequence[str] = (INLINE, SHARED)
) -> tuple[Series, ...]:
    """Milliseconds from asking until the last page was read; one series a size and plane."""
    async with child_process("-P", "-m", "outrider.benchmarks.wire.tensors") as (address, _):
        return tuple(
            [
                await _measure(address, size, plane, num_samples=num_samples, num_warmups=num_warmups)
                for size in num_bytes
                for plane in planes
            ]
        )


async def _measure(address: str, num_bytes: int, plane: str, *, num_samples: int, num_warmups: int) -> Series:
    link: Any = await RemoteTarget(address, shares_memory=plane == SHARED).attach()
    events = link.events()
    samples: list[float] = []
    for generation in range(1, num_warmups + num_samples + 1):
        began = time.perf_counter()
        link.send([Score(0, generation, num_bytes // 4, (bytes(chain_size(num_bytes // 4)), 0), (0,))])
        batch = await anext(events)
        rows = batch.all_events()[0].form.target_probs
        if not (rows[0, ::_PAGE_VALUES] == generation % 1000).all():
            raise ProtocolError("the rows are not what was sent")
        samples.append(1e3 * (time.perf_counter() - began))
        del batch, rows
    if link.tensor_plane != plane:
        raise ProtocolError(f"the link has {link.tensor_plane}, not {plane}: is there shared memory on this host?")
    await link.close()
    labels: dict[str, Label] = {"call": "link", "over": plane, "num_bytes": 0, "reply_bytes": num_bytes}
    return Series("round_trip", "ms", tuple(samples[num_warmups:]), labels)


async def _serve() -> None:
    server = await serve_target(_RowsTarget(), host="127.0.0.1", port=0)
    await server.set_serving(True)
    print(server.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await server.stop()


def main() -> None:
    """The process that answers, until its standard input ends."""
    argparse.ArgumentParser(prog="python -m outrider.benchmarks.wire.tensors", description=__doc__).parse_args()
    run(_serve())


if __name__ == "__main__":
    main()
