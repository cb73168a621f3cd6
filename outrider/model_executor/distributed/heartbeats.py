"""Heartbeats between ranks, on a socket of their own, outside the collectives: they detect a lost rank.

Owns one thread that says every half second how many steps this rank has finished, and listens for the same. A rank is
lost when its socket ends, when it says that it failed, when it sends nothing for a while (its host is gone, or it
is stopped), or when it does not get on with a step (a collective that hangs).
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

OnLost = Callable[[int, str], None]
"""Called with a rank and what became of it, from the thread, once."""

_BEAT_S = 0.5
"""Interval of heartbeats between ranks."""
_SILENT_S = 30.0
"""Compiling a kernel may keep a process from saying anything for some seconds."""
_STALLED_S = 300.0
_RECEIVED_BYTES = 4096
_FAILED = "failed: "
ENDED = "ended"


class _Peer:
    """State of one other rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.received_at = self.moved_at = time.monotonic()
        self.num_finished = 0
        self.rest = b""


class Heartbeats:
    """Beats to and from some other ranks."""

    def __init__(self, connections: Mapping[int, socket.socket], on_lost: OnLost) -> None:
        self.num_finished = 0
        """Steps that this rank has finished; written by the thread that runs them."""
        self.num_expected = 0
        """Steps that the others are to finish."""
        self._on_lost = on_lost
        self._connections = dict(connections)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def report_failure(self, reason: str) -> None:
        """Tell the others why this rank is about to end."""
        self._say(f"{_FAILED}{' '.join(reason.split())}\n".encode())

    def stop(self) -> None:
        """Report no lost rank from now on."""
        self._stopping.set()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, _Peer(rank))
            peers: list[_Peer] = [key.data for key in selector.get_map().values()]
            next_beat = time.monotonic()
            while not self._stopping.is_set():
                if time.monotonic() >= next_beat:
                    self._say(f"{self.num_finished}\n".encode())
                    next_beat = time.monotonic() + _BEAT_S
                lost = self._listen(selector) or self._missing(peers)
                if lost is not None:
                    if not self._stopping.is_set():
                        self._on_lost(*lost)
                    return

    def _say(self, line: bytes) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # a lost rank is found by listening
                connection.sendall(line)

    def _listen(self, selector: selectors.BaseSelector) -> tuple[int, str] | None:
        for key, _ in selector.select(_BEAT_S):
            peer: _Peer = key.data
            try:
                content = key.fileobj.recv(_RECEIVED_BYTES)  # type: ignore[union-attr]
            except OSError:
                content = b""
            if not content:
                return peer.rank, ENDED
            *lines, peer.rest = (peer.rest + content).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith(_FAILED):
                    return peer.rank, text
                _note_received(peer, int(text))
        return None

    def _missing(self, peers: list[_Peer]) -> tuple[int, str] | None:
        now = time.monotonic()
        for peer in peers:
            if now - peer.received_at > _SILENT_S:
                return peer.rank, f"sent nothing for {_SILENT_S:g} s"
            if peer.num_finished >= self.num_expected:
                peer.moved_at = now
            elif now - peer.moved_at > _STALLED_S:
                return peer.rank, f"has been at step {peer.num_finished + 1} for {_STALLED_S:g} s"
        return None


def _note_received(peer: _Peer, num_finished: int) -> None:
    peer.received_at = time.monotonic()
    if num_finished != peer.num_finished:
        peer.num_finished, peer.moved_at = num_finished, peer.received_at
