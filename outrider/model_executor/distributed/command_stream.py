"""Command stream from rank 0 to the other ranks: a short header and the numbers as they are, no copy in between.

A rank on a GPU looks for the next command without sleeping while its device computes, and for a moment after, since
waking up takes as long as some layers of a small model; after that, and on a CPU, it sleeps until one comes.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np

from outrider.model_executor.distributed.rank_connections import receive
from outrider.model_executor.worker_commands import WorkerCommand, no_numbers

_MOST_ARGUMENTS = 20
_HEADER = struct.Struct(f"=ii{_MOST_ARGUMENTS}iq")
"""Operation, number of arguments, arguments, number of numbers; native byte order, as the numbers have."""
_NO_ARGUMENTS = (0,) * _MOST_ARGUMENTS
STOP = 0
"""The operation after which nothing comes."""


class CommandSender:
    """Rank 0's end."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = tuple(connections)

    def send(self, command: WorkerCommand) -> None:
        """Tell every other rank; ``OSError`` when one is gone."""
        arguments = (*command.arguments, *_NO_ARGUMENTS[len(command.arguments) :])
        header = _HEADER.pack(command.operation, len(command.arguments), *arguments, len(command.numbers))
        message = header + command.numbers.tobytes()
        for connection in self._connections:
            connection.sendall(message)

    def close(self) -> None:
        """Tell the others that nothing comes any more."""
        message = _HEADER.pack(STOP, 0, *_NO_ARGUMENTS, 0)
        for connection in self._connections:
            try:
                connection.sendall(message)
            except OSError:  # gone already
                continue


class CommandReceiver:
    """Another rank's end."""

    def __init__(self, connection: socket.socket, *, spin_s: float) -> None:
        self._connection = connection
        self._spin_s = spin_s

    def next(self, is_busy: Callable[[], bool] = lambda: False) -> WorkerCommand | None:
        """The next command, however long it takes; None: the last was read. ``ConnectionError``: rank 0 is gone.

        ``is_busy`` says whether the device computes; it is asked until it does not, or the command is there.
        """
        self._wait(is_busy)
        operation, num_arguments, *rest = _HEADER.unpack(receive(self._connection, _HEADER.size))
        if operation == STOP:
            return None
        num_bytes = rest[-1] * np.dtype(np.int32).itemsize
        numbers = np.frombuffer(receive(self._connection, num_bytes), np.int32) if num_bytes else no_numbers()
        return WorkerCommand(operation, tuple(rest[:num_arguments]), numbers)

    def _wait(self, is_busy: Callable[[], bool]) -> None:
        until = time.monotonic() + self._spin_s
        while True:
            if is_busy():
                until = time.monotonic() + self._spin_s
            elif time.monotonic() >= until:
                return
            if select.select((self._connection,), (), (), 0)[0]:
                return
