"""Ports of loopback that no other process takes before their server starts, nor while it is away."""

from __future__ import annotations

import socket

from outrider.cli.stack.plan import LOOPBACK


class HeldPort:
    """A port that the kernel gave, bound until it is closed; a server that reuses addresses listens on it meanwhile.

    The kernel neither gives it to another socket that asks for any port nor uses it for an outgoing connection, also
    while its server is away. Linux allows the second bind: both sockets set SO_REUSEADDR, and this one never listens.
    """

    def __init__(self, number: int = 0) -> None:
        """``number``: the port; 0 for any. ``OSError`` if it is taken."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.bind((LOOPBACK, number))
        except OSError:
            self._socket.close()
            raise
        # Only now: with it before, the kernel may give a port that another socket holds in this way.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give it back; idempotent."""
        self._socket.close()


_held_ports: list[HeldPort] = []


def hold_port() -> int:
    """A port that this process holds until it ends."""
    held = HeldPort()
    _held_ports.append(held)
    return held.number
