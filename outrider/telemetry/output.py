"""Standard output and standard error that do not block and do not raise, and the last line after an error.

A process continues to serve if its log cannot be written: a full disk, a closed pipe, a stopped terminal. Owns the
queue before a file descriptor, the thread that empties it, and the count of dropped lines.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO, cast

from outrider.errors import OutriderError

MAX_PENDING_BYTES = 1 << 20
"""Text that waits to be written; what comes beyond it is dropped."""

_RETRY_S = 1.0
"""Interval of attempts at an output that failed, when there is nothing new to write."""
_FAREWELL_S = 1.0
"""Longest wait of the process's end for pending output."""
_CHUNK_BYTES = 64 << 10


def dropped_notice(count: int) -> str:
    """The line with the number of dropped lines."""
    return f"{count} line{'' if count == 1 else 's'} dropped while this output could not be written"


class DroppingStream(io.TextIOBase):
    """Text stream over a file descriptor: ``write`` queues and returns at once, a thread writes.

    Lines that find the queue full or cannot be written are dropped and counted. The first successful write afterwards
    is the line that ``notice`` makes of the count; it is tried every second. Thread-safe.
    """

    def __init__(self, descriptor: int) -> None:
        self.notice: Callable[[int], str] = dropped_notice
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._num_dropped = 0
        self._is_cut = False  # the last line that was written lacks its end
        self._is_writing = False
        self._thread: threading.Thread | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the output; characters that it does not have are written as escapes."""
        return "utf-8"

    def fileno(self) -> int:
        """The file descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """True if it is a terminal."""
        with contextlib.suppress(OSError):
            return os.isatty(self._descriptor)
        return False

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str, /) -> int:
        """Queue the text, or drop it if the queue is full."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._pending_bytes + len(data) > MAX_PENDING_BYTES:
                self._num_dropped += data.count(b"\n")
            elif data:
                self._pending.append(data)
                self._pending_bytes += len(data)
            self._start()
            self._changed.notify_all()
        return len(text)

    def drain(self, within_s: float = _FAREWELL_S) -> None:
        """Wait until everything in the queue is written or dropped, for at most ``within_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_drained, within_s)

    @property
    def is_drained(self) -> bool:
        """True if everything in the queue is written or dropped."""
        with self._changed:
            return not self._pending and not self._is_writing

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"output-{self._descriptor}", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending: what is pending is lost
                self._thread.start()

    def _run(self) -> None:
        while True:
            data, num_dropped = self._take()
            notice = f"{self.notice(num_dropped)}\n".encode() if num_dropped else b""
            self._put(notice, data, num_dropped)

    def _take(self) -> tuple[bytes, int]:
        """Next text to write, and the number of lines that were dropped before it."""
        with self._changed:
            while not self._pending:
                if not self._changed.wait(_RETRY_S if self._num_dropped else None):
                    break
            data = bytearray()
            while self._pending and len(data) < _CHUNK_BYTES:
                data += self._pending.popleft()
            self._pending_bytes -= len(data)
            self._is_writing = True
            return bytes(data), self._num_dropped

    def _put(self, notice: bytes, data: bytes, num_dropped: int) -> None:
        content = (b"\n" if self._is_cut and notice else b"") + notice + data
        written = self._write_all(content)
        with self._changed:
            if written >= len(content) - len(data):
                self._num_dropped -= num_dropped
            rest = content[max(written, len(content) - len(data)) :]
            self._num_dropped += rest.count(b"\n")
            if written:
                self._is_cut = content[written - 1 : written] != b"\n" and written < len(content)
            self._is_writing = False
            self._changed.notify_all()

    def _write_all(self, content: bytes) -> int:
        """Number of bytes that could be written; waits while the reader is slow."""
        written = 0
        while written < len(content):
            try:
                written += os.write(self._descriptor, content[written:])
            except BlockingIOError:
                self._wait_until_writable()
            except OSError:
                break
        return written

    def _wait_until_writable(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            select.select([], [self._descriptor], [], _RETRY_S)


def guard_output() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that do not block and do not raise.

    Pending lines are written when the interpreter ends. A stream without a file descriptor is kept; a closed one is
    replaced by the null device, also standard input.
    """
    _open_standard_descriptors()
    sys.stdout = _guarded(sys.stdout, 1)
    sys.stderr = _guarded(sys.stderr, 2)


def drain_output() -> None:
    """Wait briefly for pending lines, for a process that ends without its exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, DroppingStream):
            stream.drain()


def _open_standard_descriptors() -> None:
    """Number 0, 1 or 2 of a file or socket that is opened later would be taken by a child's standard streams."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the null device gets the lowest free number, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _guarded(stream: TextIO | None, standard: int) -> TextIO:
    if isinstance(stream, DroppingStream):
        return stream
    descriptor = standard if stream is None else _descriptor_of(stream)
    if descriptor is None:
        return cast("TextIO", stream)
    guarded = DroppingStream(descriptor)
    atexit.register(guarded.drain)
    return cast("TextIO", guarded)


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        stream.flush()
    return descriptor


ERROR_PREFIX = "error: "
"""Start of the line, by which a parent process finds the reason."""


@contextlib.contextmanager
def exit_cleanly() -> Iterator[None]:
    """Wrap a ``__main__``: an ``OutriderError`` becomes a line and exit code 1, an interrupt becomes exit code 130.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        yield
    except OutriderError as error:
        sys.stderr.write(f"{ERROR_PREFIX}{error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
