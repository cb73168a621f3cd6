"""A TCP proxy in front of one service, with faults on what passes in each direction.

Owns connections and bytes; knows nothing of gRPC. A fault changes the state of the proxy (``impair``) or ends its
connections (``cut``, ``truncate``); ``restore`` ends what ``impair`` began. A connection that lost bytes while a
direction was a black hole stays one: as on a network whose packets vanished, only its ends can give it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from dataclasses import dataclass, field

from outrider.cli.stack.held_ports import HeldPort

_CHUNK_BYTES = 1 << 16


class Direction(enum.Enum):
    """Direction of bytes."""

    TO_SERVICE = "to service"
    FROM_SERVICE = "from service"


@dataclass(frozen=True, slots=True)
class Impairment:
    """Impairment of bytes in one direction."""

    is_stalled: bool = False
    """Bytes wait in the proxy, and the sender's buffers fill."""
    is_black_hole: bool = False
    """Bytes vanish."""
    delay_s: float = 0.0
    """Delay of bytes."""
    bytes_per_s: float = 0.0
    """Rate at which bytes come, a few at a time; 0: at once."""


NONE = Impairment()


@dataclass(slots=True, eq=False)
class _Connection:
    """Both halves of one proxied connection."""

    client: asyncio.StreamWriter
    service: asyncio.StreamWriter | None = None
    lost: set[Direction] = field(default_factory=set)
    """Directions in which bytes have vanished."""
    truncated: set[Direction] = field(default_factory=set)
    """Directions in which the next bytes are cut short, and the connection with them."""

    def abort(self) -> None:
        """Reset both halves."""
        for writer in (self.client, self.service):
            if writer is not None:
                writer.transport.abort()


class Proxy:
    """Forwards connections to ``address``; listens at a port that stays the same."""

    def __init__(self, address: str) -> None:
        self._held = HeldPort()
        self.port = self._held.number
        self._host, _, port = address.rpartition(":")
        self._service_port = int(port)
        self._impairments = dict.fromkeys(Direction, NONE)
        self._is_refusing = False
        self._changed = asyncio.Event()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Address that it listens at."""
        return f"127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def close(self) -> None:
        """End every connection and stop listening."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._held.close()

    def impair(self, impairment: Impairment, *directions: Direction) -> None:
        """Impair these directions from now on; all where none is named."""
        for direction in directions or tuple(Direction):
            self._impairments[direction] = impairment
        self._tell()

    def refuse(self) -> None:
        """Reset what is open and what comes from now on."""
        self._is_refusing = True
        self.cut()

    def restore(self) -> None:
        """Forward again; connections that lost bytes stay lost."""
        self._is_refusing = False
        self.impair(NONE)

    def cut(self) -> None:
        """Reset every open connection."""
        for connection in tuple(self._connections):
            connection.abort()

    def truncate(self, direction: Direction) -> None:
        """Truncation: half of the next bytes in this direction arrive, and then each connection ends."""
        for connection in self._connections:
            connection.truncated.add(direction)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(writer)
        self._connections.add(connection)
        try:
            if not self._is_refusing:
                await self._forward(connection, reader)
        except OSError:
            pass
        finally:
            connection.abort()
            self._connections.discard(connection)
            self._tasks.discard(task)

    async def _forward(self, connection: _Connection, from_client: asyncio.StreamReader) -> None:
        from_service, to_service = await asyncio.open_connection(self._host, self._service_port)
        connection.service = to_service
        pumps = [
            asyncio.create_task(self._pump(connection, Direction.TO_SERVICE, from_client, to_service)),
            asyncio.create_task(self._pump(connection, Direction.FROM_SERVICE, from_service, connection.client)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        connection: _Connection,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Pump until the source ends; a source that ends in a black hole is not seen to end before the hole does."""
        while data := await reader.read(_CHUNK_BYTES):
            if not await self._deliver(connection, direction, data, writer):
                return
        while self._impairments[direction].is_black_hole or self._impairments[direction].is_stalled:
            await self._changed.wait()

    async def _deliver(
        self, connection: _Connection, direction: Direction, data: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """True if the connection goes on."""
        while self._impairments[direction].is_stalled:
            await self._changed.wait()
        impairment = self._impairments[direction]
        if impairment.is_black_hole:
            connection.lost.add(direction)
        if direction in connection.lost:
            return True
        if impairment.delay_s:
            await asyncio.sleep(impairment.delay_s)
        if direction in connection.truncated:
            writer.write(data[: len(data) // 2])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(writer.drain(), 1.0)
            writer.close()
            return False
        await self._write(writer, data, direction)
        return True

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, direction: Direction) -> None:
        while data:
            rate = self._impairments[direction].bytes_per_s
            num_bytes = max(1, int(rate * _DRIBBLE_S)) if rate else len(data)
            writer.write(data[:num_bytes])
            await writer.drain()
            data = data[num_bytes:]
            if rate:
                await asyncio.sleep(_DRIBBLE_S)


_DRIBBLE_S = 0.02
"""Pause between two pieces of a dribble."""
