"""Sockets between rank 0 and each of the others, found through the store that the ranks share.

Owns how they are opened: two for each rank, one for steps and one for heartbeats, so that neither waits for the other.
A secret that only the store gives tells our ranks from strangers.
"""

from __future__ import annotations

import enum
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.addresses import is_ipv6, listening_socket
from outrider.errors import UnavailableError

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"!{_SECRET_BYTES}sII")
_POLL_S = 0.2


class Purpose(enum.IntEnum):
    """Purpose of a socket."""

    COMMANDS = 0
    HEARTBEATS = 1


@dataclass(frozen=True, slots=True)
class RankZeroAddress:
    """Listener of rank 0, which waits for the other ranks."""

    host: str
    port: int
    secret: bytes

    def encode(self) -> str:
        """Bytes to put into the store."""
        return f"{self.host} {self.port} {self.secret.hex()}"

    @classmethod
    def decode(cls, text: bytes) -> RankZeroAddress:
        """Address from the bytes in the store."""
        host, port, secret = text.decode().split()
        return cls(host, int(port), bytes.fromhex(secret))


class RankListener:
    """Rank 0's side, until all ranks are there. ``host`` is how the others reach it."""

    def __init__(self, host: str) -> None:
        is_local = host in {"127.0.0.1", "localhost", "::1"}
        everywhere = "::" if is_ipv6(host) else "0.0.0.0"
        self._socket = listening_socket("127.0.0.1" if host == "localhost" else host if is_local else everywhere, 0)
        self._socket.settimeout(_POLL_S)
        self.address = RankZeroAddress(host, self._socket.getsockname()[1], secrets.token_bytes(_SECRET_BYTES))

    def accept(
        self, size: int, deadline_s: float, check: Callable[[], None]
    ) -> dict[tuple[int, Purpose], socket.socket]:
        """Both sockets of every other rank; ``check`` is called now and then and raises what makes waiting vain."""
        found: dict[tuple[int, Purpose], socket.socket] = {}
        until = time.monotonic() + deadline_s
        with self._socket:
            while len(found) < (size - 1) * len(Purpose):
                check()
                if time.monotonic() > until:
                    missing = sorted(set(range(1, size)) - {rank for rank, _ in found})
                    raise UnavailableError(f"ranks {missing} of {size} did not come within {deadline_s:g} s")
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    continue
                self._take_in(connection, size, found)
        return found

    def _take_in(self, connection: socket.socket, size: int, found: dict[tuple[int, Purpose], socket.socket]) -> None:
        connection.settimeout(_POLL_S * 10)
        try:
            secret, rank, purpose = _HELLO.unpack(receive(connection, _HELLO.size))
            known = secrets.compare_digest(secret, self.address.secret) and 0 < rank < size
            key = (rank, Purpose(purpose))
        except (OSError, ValueError):
            known, key = False, (0, Purpose.COMMANDS)
        if not known:
            connection.close()
            return
        found[key] = _prepared(connection)


def connect(address: RankZeroAddress, rank: int, purpose: Purpose, deadline_s: float) -> socket.socket:
    """A rank's side of one socket."""
    connection = socket.create_connection((address.host, address.port), timeout=deadline_s)
    connection.sendall(_HELLO.pack(address.secret, rank, purpose))
    return _prepared(connection)


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly this many bytes; ``ConnectionError`` when the other side ends before."""
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("the other side has ended")
        done += count
    return bytes(content)


def _prepared(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
