"""The draft's end of proposal channels: one for each target that it proposes to."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outrider.batched import AnswerBatch
from outrider.errors import ConfigError, UnavailableError
from outrider.ports import ChannelEvent, ChannelState, CloseChannel, EventBatch, OfferChannel
from outrider.proposal_channel.messages import MessageReader, may_be_sent, to_bytes
from outrider.proposal_channel.pushes import ChainStart, Pushes
from outrider.proposal_channel.pushes import to_bytes as pushes_to_bytes
from outrider.proposal_channel.verdicts import Verdicts, all_accepted, take_verdicts
from outrider.readings import Reading
from outrider.tensor_plane.control import HANDSHAKE_S, ControlConnection, connect, prove
from outrider.types import PeerAddress

_log = logging.getLogger(__name__)

MAX_CHANNELS = 64
"""Bound on the channels of one link."""
_SEND_S = 0.05
"""A target that takes nothing for so long is not waited for."""

_TICK_S = 0.5
"""Longest blocking call, after which the thread sees that it should end."""
_Tell = Callable[[ChannelEvent], None]
_Submit = Callable[[Verdicts | ChainStart], None]
_Key = tuple[int, int]


class ProposalSender:
    """Channels to targets, by link and number of the connection. ``handle`` and ``send`` are called by one thread."""

    def __init__(self, call: Callable[[PeerAddress], socket.socket] | None = None) -> None:
        """``call`` connects to a target of another host; ``ConfigError`` where the settings forbid that. None: there
        are no channels between hosts.
        """
        self._call = call
        self._sockets: dict[_Key, tuple[socket.socket, _Tell]] = {}
        self._wanted: set[_Key] = set()
        """Connections that were offered and not closed."""
        self._chained: dict[_Key, _Submit] = {}
        """Connections whose proposals the draft goes on from."""
        self._lock = threading.Lock()
        self._num_sent = 0

    def handle(self, link_id: int, command: Any, tell: _Tell, submit: _Submit) -> None:  # noqa: ANN401 - any of a channel
        """Connect to a target, or end a channel. ``submit`` passes verdicts to the engine, from any thread."""
        key = link_id, command.connection
        if isinstance(command, CloseChannel):
            self._end(key)
        elif isinstance(command, OfferChannel):
            if key in self._wanted or sum(other == link_id for other, _ in list(self._wanted)) >= MAX_CHANNELS:
                reason = f"connection {command.connection} is there already, or one of more than {MAX_CHANNELS}"
                tell(ChannelState(command.connection, is_open=False, reason=reason))
                return
            with self._lock:
                self._wanted.add(key)
            if command.is_chained:
                self._chained[key] = submit
            threading.Thread(
                target=self._serve, args=(key, command, tell, submit), name="proposal-channel", daemon=True
            ).start()

    def admit(self, connected: socket.socket) -> None:
        """Close it: no peer connects to a draft."""
        connected.close()

    def send(self, link_id: int, batch: EventBatch[Any]) -> EventBatch[Any]:
        """Send the proposals of a message to the targets that wait for them; the message, which says what was sent."""
        if not any(batched.channel for batched in batch.batched):
            return batch
        sent = [
            self._pushed(link_id, each) if isinstance(each, Pushes) else self._sent(link_id, each)
            for each in batch.batched
        ]
        return replace(batch, batched=tuple([batched for batched in sent if batched is not None]))

    def drop_link(self, link_id: int) -> None:
        """End all channels of a link."""
        for key in [key for key in list(self._wanted) if key[0] == link_id]:
            self._end(key)

    def readings(self) -> list[Reading]:
        """Numbers of messages that went by a channel."""
        return [Reading("outrider_direct_proposals_total", self._num_sent)]

    def close(self) -> None:
        """End all channels; idempotent."""
        for key in list(self._wanted):
            self._end(key)

    def _pushed(self, link_id: int, pushes: Pushes) -> None:
        self._write((link_id, pushes.channel), pushes_to_bytes(pushes))

    def _write(self, key: _Key, content: bytes) -> bool:
        """Write a message; False where there is no channel, or it ends: a part of the message may have been written."""
        found = self._sockets.get(key)
        if found is None:
            return False
        connected, tell = found
        try:
            connected.sendall(content)
        except OSError as error:
            self._lose(key, tell, error)
            return False
        return True

    def _sent(self, link_id: int, batched: AnswerBatch[Any]) -> AnswerBatch[Any]:
        key = link_id, batched.channel
        if not batched.channel or key not in self._sockets or not may_be_sent(batched):
            return replace(batched, channel=0)
        submit = self._chained.get(key)
        if submit is not None:
            submit(ChainStart(all_accepted(batched), batched.channel))  # before the verdicts on them can come
        if not self._write(key, to_bytes(batched)):
            return replace(batched, channel=0)
        self._num_sent += 1
        return batched

    def _serve(self, key: _Key, command: OfferChannel, tell: _Tell, submit: _Submit) -> None:
        """Connect, and take verdicts until the channel ends; runs in the connection's thread."""
        connected = self._connect(key, command, tell)
        if connected is None:
            return
        try:
            with connected.dup() as receiving:
                receiving.settimeout(_TICK_S)
                reader = MessageReader(receiving, take_verdicts)
                while key in self._wanted:
                    verdicts = reader.read()
                    if verdicts is not None:
                        submit(verdicts)
        except OSError as error:
            self._lose(key, tell, error)

    def _lose(self, key: _Key, tell: _Tell, error: OSError) -> None:
        """A channel has ended; its coordinator is told once."""
        if key in self._wanted:
            self._end(key)
            _log.info("the proposal channel is given up: %s", error)
            tell(ChannelState(key[1], is_open=False, reason=f"the target cannot be reached: {error}"))

    def _open(self, command: OfferChannel) -> ControlConnection:
        """A connection to the target; ``UnavailableError`` or ``ConfigError`` says why there is none."""
        if command.target is None:
            return connect(command.offer)
        if self._call is None:
            raise UnavailableError("this draft has no channels to other hosts")
        until = time.monotonic() + HANDSHAKE_S
        return prove(command.offer, self._call(command.target), until)

    def _connect(self, key: _Key, command: OfferChannel, tell: _Tell) -> socket.socket | None:
        connection = command.connection
        try:
            connected = self._open(command).detach()
        except (UnavailableError, ConfigError, OSError) as error:
            with self._lock:
                self._wanted.discard(key)
            tell(ChannelState(connection, is_open=False, reason=str(error)))
            return None
        connected.settimeout(_SEND_S)
        with self._lock:
            if key in self._wanted:
                self._sockets[key] = connected, tell
                tell(ChannelState(connection, is_open=True))
                return connected
        connected.close()  # it was closed meanwhile
        return None

    def _end(self, key: _Key) -> None:
        with self._lock:
            self._wanted.discard(key)
            found = self._sockets.pop(key, None)
            self._chained.pop(key, None)
        if found is not None:
            with contextlib.suppress(OSError):
                found[0].shutdown(socket.SHUT_RDWR)
            found[0].close()
