"""Control connection between a writer and a reader: a socket beside the plane, for messages of some bytes.

Owns who may connect (each end proves that it holds the offer's token), framing, and that no message waits without a
limit. A peer that died is seen here and not in a collective. Messages are JSON objects. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from outrider.addresses import listening_socket
from outrider.errors import UnavailableError
from outrider.limits import RateLimit
from outrider.planes import ID_BYTES, PlaneOffer

_log = logging.getLogger(__name__)

Message = dict[str, Any]
"""Message with its "type"."""

HANDSHAKE_S = 5.0
"""Longest wait of either end for the other's part of the handshake."""
_SEND_S = 2.0
"""Longest wait for a peer that does not read, after which the connection is closed."""
_PAUSE_S = 0.5
"""Pause after a connection that could not be accepted, for want of descriptors, say."""
_WARNING_INTERVAL_S = 10.0
"""Interval of warnings, so that strangers cannot fill the log."""
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 1 << 20
_NONCE_BYTES = 16
_MAC_BYTES = 32
_RECEIVED_BYTES = 65536


class ControlConnection:
    """Messages in both directions. One thread at a time receives, any may send."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(_SEND_S)
        self._socket = connected
        self._rest = bytearray()
        self._sending = threading.Lock()
        self._is_closed = False

    @property
    def local_host(self) -> str:
        """Address of this end, by which the peer reaches it."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send one message; ``OSError`` when the peer is gone or takes nothing."""
        content = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, timeout_s: float) -> list[Message]:
        """All messages that are there; waits for the first. ``OSError`` when the peer is gone."""
        if self._is_closed:
            raise ConnectionError("the connection is closed")
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(self._socket, select.POLLIN)
        if poller.poll(max(0, round(1000 * timeout_s))):
            content = self._socket.recv(_RECEIVED_BYTES)
            if not content:
                raise ConnectionError("the peer has closed the connection")
            self._rest += content
        return self._take()

    def detach(self) -> socket.socket:
        """The socket itself, for a caller with messages of its own; nothing was received on it."""
        return self._socket

    def close(self) -> None:
        """Idempotent; the receiving thread is notified."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _take(self) -> list[Message]:
        found: list[Message] = []
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            if length > _MAX_MESSAGE_BYTES:
                raise ConnectionError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._rest) < end:
                break
            found.append(_read(bytes(self._rest[_LENGTH.size : end])))
            del self._rest[:end]
        return found


def _read(content: bytes) -> Message:
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("a message that is no JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ConnectionError("a message without a type")
    return message


class ControlListener:
    """Listener for the readers of one service. Connections without a valid token are closed and delay no other."""

    def __init__(self, host: str) -> None:
        """Listen on an address of this host; port 0 takes a free one."""
        self._socket = listening_socket(host, 0)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._expected: dict[bytes, tuple[PlaneOffer, Callable[[ControlConnection], None]]] = {}
        self._lock = threading.Lock()
        self._warnings = RateLimit(_WARNING_INTERVAL_S)
        self._is_closed = False
        threading.Thread(target=self._accept, name="tensor-plane-listener", daemon=True).start()

    def new_offer(self) -> PlaneOffer:
        """An offer of a connection to this listener, which ``expect`` makes good."""
        return PlaneOffer.new(self.host, self.port)

    def expect(self, offer: PlaneOffer, on_connected: Callable[[ControlConnection], None]) -> None:
        """Let one reader in with this offer; ``on_connected`` is called from a thread of that connection."""
        with self._lock:
            self._expected[offer.offer_id] = (offer, on_connected)

    def drop(self, offer: PlaneOffer) -> None:
        """Accept no connection for this offer any more."""
        with self._lock:
            self._expected.pop(offer.offer_id, None)

    def close(self) -> None:
        """Accept no connections any more."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connected, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed:
                    _log.warning("the tensor plane cannot take in a connection: %s", error)
                    time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self.greet, args=(connected,), name="tensor-plane", daemon=True).start()

    def greet(self, connected: socket.socket) -> None:
        """Serve a connection in this thread; closed without a valid token."""
        try:
            on_connected = self._admit(connected)
        except OSError as error:
            connected.close()
            with self._lock:
                num_suppressed = self._warnings.take()
            if num_suppressed is not None:
                more = {"fields": {"num_suppressed": num_suppressed}}
                _log.warning("a connection to the tensor plane was refused: %s", error, extra=more)
            return
        on_connected(ControlConnection(connected))

    def _admit(self, connected: socket.socket) -> Callable[[ControlConnection], None]:
        """Challenge a reader; ``OSError`` for one that does not hold an offer of ours."""
        until = time.monotonic() + HANDSHAKE_S
        _prepare(connected)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connected.sendall(nonce)
        answer = _receive(connected, ID_BYTES + _NONCE_BYTES + _MAC_BYTES, until)
        offer_id, theirs, proof = (
            answer[:ID_BYTES],
            answer[ID_BYTES : ID_BYTES + _NONCE_BYTES],
            answer[ID_BYTES + _NONCE_BYTES :],
        )
        with self._lock:
            found = self._expected.get(offer_id)
            if found is None or not hmac.compare_digest(proof, _mac(found[0], b"reader", nonce + theirs)):
                raise ConnectionError("it holds no offer")
            del self._expected[offer_id]
        connected.sendall(_mac(found[0], b"writer", nonce + theirs))
        return found[1]


def connect(offer: PlaneOffer) -> ControlConnection:
    """A reader's end; ``UnavailableError`` when the writer cannot be reached or does not hold the offer."""
    until = time.monotonic() + HANDSHAKE_S
    try:
        connected = socket.create_connection((offer.host, offer.port), timeout=HANDSHAKE_S)
    except OSError as error:
        raise UnavailableError(f"tensor plane: {offer.host} port {offer.port} cannot be reached: {error}") from error
    return prove(offer, connected, until)


def prove(offer: PlaneOffer, connected: socket.socket, until: float) -> ControlConnection:
    """A reader's end of a connection that was made; ``UnavailableError`` when the other end does not show before a time
    that it holds the offer.
    """
    try:
        _prepare(connected)
        nonce = _receive(connected, _NONCE_BYTES, until)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connected.sendall(offer.offer_id + ours + _mac(offer, b"reader", nonce + ours))
        if not hmac.compare_digest(_receive(connected, _MAC_BYTES, until), _mac(offer, b"writer", nonce + ours)):
            raise ConnectionError("it does not know its own offer")
    except OSError as error:
        connected.close()
        raise UnavailableError(f"tensor plane: {offer.host} port {offer.port} is not the writer: {error}") from error
    return ControlConnection(connected)


def _prepare(connected: socket.socket) -> None:
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _mac(offer: PlaneOffer, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(offer.token, role + nonces, hashlib.sha256)


def _receive(connected: socket.socket, size: int, until: float) -> bytes:
    """Exactly ``size`` bytes before a time; ``OSError`` when they do not come."""
    content = b""
    while len(content) < size:
        connected.settimeout(max(0.001, until - time.monotonic()))
        part = connected.recv(size - len(content))
        if not part:
            raise ConnectionError("it has hung up")
        content += part
    return content
