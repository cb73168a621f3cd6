"""A TCP proxy of one address that can fail: it delays, stops forwarding or swallows what comes, per direction, or cuts
all.

``"up"`` is from the client to the server, ``"down"`` the other way. Faults apply to connections that are open and to
those to come, until ``heal``. Bytes that were swallowed are gone, so a connection that lost some never works again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Literal

Direction = Literal["up", "down"]
BOTH: tuple[Direction, Direction] = ("up", "down")


class TcpProxy:
    """Listens on a port of 127.0.0.1 while its context is open."""

    def __init__(self, server_port: int = 0) -> None:
        self.port = 0
        self.num_accepted = 0
        """Connections so far."""
        self.server_port = server_port
        """Destination of connections that are accepted from now on."""
        self.delay_s: Callable[[], float] = lambda: 0.0
        """Delay of each piece that comes; pieces stay in order."""
        self.refuses = False
        """True: connections are closed as soon as they come."""
        self._stalled: set[Direction] = set()
        self._swallowed: set[Direction] = set()
        self._changed = asyncio.Condition()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def stall(self, *directions: Direction) -> None:
        """Hold back what comes, until ``heal``."""
        await self._set(stalled=directions or BOTH, swallowed=())

    async def black_hole(self, *directions: Direction) -> None:
        """Swallow what comes; nobody is told."""
        await self._set(stalled=(), swallowed=directions or BOTH)

    async def heal(self) -> None:
        await self._set(stalled=(), swallowed=())

    def cut(self) -> None:
        """Close every connection."""
        for task in self._connections:
            task.cancel()

    async def _set(self, *, stalled: Collection[Direction], swallowed: Collection[Direction]) -> None:
        async with self._changed:
            self._stalled, self._swallowed = set(stalled), set(swallowed)
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TcpProxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            if self._connections:
                await asyncio.wait(tuple(self._connections))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self.num_accepted += 1
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
            writers.append(up_writer)
            pumps = [
                asyncio.create_task(self._pump(reader, up_writer, "up")),
                asyncio.create_task(self._pump(up_reader, writer, "down")),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
        except OSError:
            pass  # the server is not there: the client's connection is closed
        finally:
            for end in writers:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(65536):
                if delay_s := self.delay_s():
                    await asyncio.sleep(delay_s)
                async with self._changed:
                    await self._changed.wait_for(lambda: direction not in self._stalled)
                if direction not in self._swallowed:
                    writer.write(content)
                    await writer.drain()
