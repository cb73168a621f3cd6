"""Channel host: who serves the commands of proposal channels in a service. No core sees them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Protocol

from outrider.batched import ScoreAhead
from outrider.ports import (
    ChannelCommand,
    ChannelEvent,
    ChannelState,
    CloseChannel,
    EventBatch,
    OfferChannel,
    RequestChannel,
    SessionLost,
)
from outrider.readings import Reading

CHANNEL_COMMANDS = frozenset((RequestChannel, OfferChannel, CloseChannel, ScoreAhead))


class ChannelHost(Protocol):
    """Proposal channels of one service; called by the engine thread. Nothing here waits."""

    def handle(
        self,
        link_id: int,
        command: ChannelCommand | ScoreAhead,
        tell: Callable[[ChannelEvent | SessionLost], None],
        submit: Callable[[Any], None],
    ) -> None:
        """Begin what a command asks for. ``tell`` sends events on its link, ``submit`` passes what is to be scored, or
        verdicts, to the engine, as if it had come by the link; both from any thread and at any time.
        """
        ...

    def admit(self, connected: socket.socket) -> None:
        """Serve the connection of a draft of another host, which is closed unless it proves that it holds an offer.
        Returns at once; from any thread.
        """
        ...

    def send(self, link_id: int, batch: EventBatch[Any]) -> EventBatch[Any]:
        """Send the proposals of a message, or verdicts on them, by their channels before it leaves; the message, which
        says what was sent.
        """
        ...

    def drop_link(self, link_id: int) -> None:
        """End all channels of a link."""
        ...

    def readings(self) -> list[Reading]:
        """Figures of this moment; from any thread."""
        ...

    def close(self) -> None:
        """End all channels; idempotent."""
        ...


class NoChannels:
    """Channel host of a service that has none."""

    def handle(
        self,
        link_id: int,
        command: ChannelCommand | ScoreAhead,
        tell: Callable[[ChannelEvent | SessionLost], None],
        submit: Callable[[Any], None],
    ) -> None:
        """Refuse it. A service without a channel is not told to score ahead."""
        if isinstance(command, RequestChannel | OfferChannel):
            tell(ChannelState(command.connection, is_open=False, reason="the service has no proposal channel"))

    def admit(self, connected: socket.socket) -> None:
        """Close it."""
        connected.close()

    def send(self, link_id: int, batch: EventBatch[Any]) -> EventBatch[Any]:
        """Nothing to send."""
        return batch

    def drop_link(self, link_id: int) -> None:
        """Nothing to end."""

    def readings(self) -> list[Reading]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing to end."""
