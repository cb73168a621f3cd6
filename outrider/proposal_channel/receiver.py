"""The target's end of proposal channels: one for each draft that proposes to it.

Rows of a ``ScoreAhead`` and the proposals that they wait for meet here, in either order: some rows go on without the
others. Nothing waits without a limit: what is
given up is answered with ``SessionLost``, which means nothing to a session that was asked for something else since.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.batched import AnswerBatch, ScoreAhead, ScoreBatch
from outrider.ports import (
    ChannelEvent,
    ChannelState,
    CloseChannel,
    EventBatch,
    OfferChannel,
    RequestChannel,
    SessionLost,
)
from outrider.proposal_channel.messages import DirectProposals, MessageReader, take_proposals
from outrider.proposal_channel.pushes import Pushes, pushes_in
from outrider.proposal_channel.verdicts import to_bytes, verdicts_on
from outrider.readings import Reading
from outrider.tensor_plane.control import ControlConnection, ControlListener

_log = logging.getLogger(__name__)

MAX_CHANNELS = 64
"""Bound on the channels of one link."""
MAX_WAITING = 64
"""Bound on what waits in one channel: scores without proposals, and proposals without scores."""
PATIENCE_S = 5.0
"""Longest wait of scores for proposals: far longer than a coordinator's."""
TICK_S = 0.5
"""Longest blocking read, after which the thread sees that it should end."""
_LOOPBACK = "127.0.0.1"

_Tell = Callable[[ChannelEvent | SessionLost], None]
_Submit = Callable[[ScoreBatch | Pushes], None]
_Key = tuple[int, int]


class ProposalReceiver:
    """Channels from drafts, by link and number of the connection. ``handle`` is called by one thread."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._listener: ControlListener | None = None
        self._channels: dict[_Key, _Channel] = {}

    def handle(self, link_id: int, command: Any, tell: _Tell, submit: _Submit) -> None:  # noqa: ANN401 - any of a channel
        """Offer a channel, end one, or let scores wait for proposals. ``submit`` passes what is to be scored to the
        engine, from any thread.
        """
        if isinstance(command, ScoreAhead):
            channel = self._channels.get((link_id, command.channel))
            if channel is None:
                _give_up(command, tell, "there is no such proposal channel")
            else:
                channel.expect(command)
        elif isinstance(command, CloseChannel):
            self._end((link_id, command.connection))
        elif isinstance(command, RequestChannel):
            try:
                tell(self._offer(link_id, command, tell, submit))
            except OSError as error:
                reason = f"the target makes no offer: {error}"
                tell(ChannelState(command.connection, is_open=False, reason=reason))

    def admit(self, connected: socket.socket) -> None:
        """Serve the connection of a draft of another host, which is closed unless it proves that it holds an offer."""
        if (listener := self._listener) is None:
            connected.close()
            return
        threading.Thread(target=listener.greet, args=(connected,), name="proposal-channel", daemon=True).start()

    def send(self, link_id: int, batch: EventBatch[Any]) -> EventBatch[Any]:
        """Send the verdicts on direct proposals to their drafts; the message, whose scores name no channel."""
        if not any(batched.channel for batched in batch.batched):
            return batch
        return replace(batch, batched=tuple([self._judged(link_id, batched) for batched in batch.batched]))

    def drop_link(self, link_id: int) -> None:
        """End all channels of a link."""
        for key in [key for key in self._channels if key[0] == link_id]:
            self._end(key)

    def readings(self) -> list[Reading]:
        """Messages that were taken are counted where they were sent, and verdicts where they are used."""
        return []

    def close(self) -> None:
        """End all channels; idempotent."""
        for key in list(self._channels):
            self._end(key)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _judged(self, link_id: int, scores: AnswerBatch[Any]) -> AnswerBatch[Any]:
        """Scores whose verdicts were sent where they came from, if that is wanted."""
        channel = self._channels.get((link_id, scores.channel)) if scores.channel else None
        if channel is not None and channel.wants_verdicts and (verdicts := verdicts_on(scores)) is not None:
            channel.send(to_bytes(verdicts))
        return replace(scores, channel=0)

    def _offer(self, link_id: int, command: RequestChannel, tell: _Tell, submit: _Submit) -> OfferChannel:
        """An offer; ``OSError`` where none can be made."""
        connection = command.connection
        key = link_id, connection
        self._channels = {each: found for each, found in self._channels.items() if not found.is_closed}
        if key in self._channels or sum(other == link_id for other, _ in self._channels) >= MAX_CHANNELS:
            raise OSError(f"connection {connection} is there already, or one of more than {MAX_CHANNELS}")
        if self._listener is None:
            self._listener = ControlListener(_LOOPBACK)
        offer = self._listener.new_offer()
        channel = _Channel(command, tell, submit, self._patience_s)
        channel.withdraw = partial(self._listener.drop, offer)
        self._channels[key] = channel
        self._listener.expect(offer, channel.serve)
        return OfferChannel(connection, offer)

    def _end(self, key: _Key) -> None:
        channel = self._channels.pop(key, None)
        if channel is not None:
            channel.withdraw()
            channel.close("it was ended")


class _Channel:
    """One connection, and what waits at it."""

    def __init__(self, command: RequestChannel, tell: _Tell, submit: _Submit, patience_s: float) -> None:
        self.is_closed = False
        self.wants_verdicts, self._begins_next = command.wants_verdicts, command.begins_next
        self.withdraw: Callable[[], object] = lambda: None
        """Takes the offer back."""
        self._connection, self._tell, self._submit, self._patience_s = command.connection, tell, submit, patience_s
        self._lock = threading.Lock()
        self._waiting: dict[bytes, tuple[ScoreAhead, float]] = {}
        """Scores by what they wait for, and until when; oldest first."""
        self._early: dict[bytes, tuple[DirectProposals, float]] = {}
        """Proposals that came before their scores, and until when they are kept; oldest first."""
        self._socket: socket.socket | None = None
        self._sending: socket.socket | None = None
        """The same connection, without a timeout: used while ``_lock`` is held."""

    def serve(self, control: ControlConnection) -> None:
        """Take proposals until either end closes; runs in the connection's thread."""
        self._socket = connected = control.detach()
        connected.settimeout(TICK_S)
        with self._lock:
            self._sending = connected.dup()
            self._sending.settimeout(0.0)
        reader, reason = MessageReader(connected, take_proposals), "it was ended"
        began = time.monotonic()
        try:
            while not self.is_closed:
                proposals = reader.read()
                if proposals is not None:
                    self._take(proposals)
                if proposals is not None or reader.is_between:
                    began = time.monotonic()
                elif time.monotonic() - began > self._patience_s:
                    raise ConnectionError("the rest of a message does not come")
                self._give_up_late()
        except OSError as error:
            reason = str(error)
        finally:
            control.close()
            self.close(reason)

    def send(self, content: bytes) -> bool:
        """Send a message without waiting; False where the channel has ended, as where the draft reads too slowly."""
        with self._lock:
            if self._sending is None or self.is_closed:
                return False
            try:
                is_sent = self._sending.send(content) == len(content)
            except OSError:
                is_sent = False
        if not is_sent:
            self.close("the draft does not read the verdicts")
        return is_sent

    def expect(self, ahead: ScoreAhead) -> None:
        """Score rows of this when their proposals are there, which may be now."""
        oldest = None
        with self._lock:
            complete, rest = self._take_early(ahead)
            is_closed = self.is_closed
            if rest is not None and not is_closed:
                self._drop_superseded(rest)
                self._waiting[rest.channel_key] = rest, time.monotonic() + self._patience_s
                if len(self._waiting) > MAX_WAITING:
                    oldest = self._waiting.pop(next(iter(self._waiting)))[0]
        for batched in complete:
            self._submit(batched)
        if rest is not None and is_closed:
            _give_up(rest, self._tell, "the proposal channel has ended")
        if oldest is not None:
            _give_up(oldest, self._tell, f"more than {MAX_WAITING} messages wait for proposals")

    def _drop_superseded(self, ahead: ScoreAhead) -> None:
        """Nothing waits for scores all of whose sessions were asked for something newer."""
        sessions = set(ahead.batched.sessions.tolist())
        for key, (older, _) in list(self._waiting.items()):
            if sessions.issuperset(older.batched.sessions.tolist()):
                del self._waiting[key]

    def close(self, reason: str) -> None:
        """Give up what waits; idempotent, from any thread."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
            waiting, self._waiting = list(self._waiting.values()), {}
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._sending is not None:
            self._sending.close()
        if was_closed:
            return
        # First that the channel is of no use: what is asked for from then on does not count on it.
        self._tell(ChannelState(self._connection, is_open=False, reason=reason))
        for ahead, _ in waiting:
            _give_up(ahead, self._tell, f"the proposal channel has ended: {reason}")

    def _take_early(self, ahead: ScoreAhead) -> tuple[list[ScoreBatch], ScoreAhead | None]:
        """Scores to compute for proposals that came before, and the rest that still waits. Proposals of other lengths
        than were asked for are the coordinator's to send.
        """
        complete: list[ScoreBatch] = []
        own, rest = ahead.channel_key, ahead
        for key in [own] if own in self._early else list(self._early):
            proposals = self._early[key][0]
            rows = rest.rows_for(key, proposals.counts)
            if rows is None and key != own:
                continue
            del self._early[key]
            if rows is None:
                return complete, None
            complete.append(self._complete(rest, rows, proposals))
            if (left := rest.without(rows)) is None:
                return complete, None
            rest = left
        return complete, rest

    def _take(self, proposals: DirectProposals) -> None:
        if self._begins_next and (pushes := pushes_in(proposals)) is not None:
            self._submit(pushes)
            return
        with self._lock:
            complete = self._meet(proposals)
            if complete is None:
                self._early[proposals.key] = proposals, time.monotonic() + self._patience_s
                if len(self._early) > MAX_WAITING:
                    del self._early[next(iter(self._early))]
        if complete is not None:
            self._submit(complete)

    def _meet(self, proposals: DirectProposals) -> ScoreBatch | None:
        """Scores that waited for these proposals, the rest of which waits on; None unless one ``ScoreAhead`` waits for
        all.
        """
        own = proposals.key
        for key in [own] if own in self._waiting else list(self._waiting):
            ahead, until = self._waiting[key]
            if (rows := ahead.rows_for(own, proposals.counts)) is not None:
                del self._waiting[key]
                if (rest := ahead.without(rows)) is not None:
                    self._waiting[rest.channel_key] = rest, until
                return self._complete(ahead, rows, proposals)
        self._waiting.pop(own, None)  # they are of other lengths: the coordinator sends them
        return None

    def _complete(self, ahead: ScoreAhead, rows: Sequence[int], proposals: DirectProposals) -> ScoreBatch:
        found = _complete(ahead, rows, proposals)
        return replace(found, begins_next=True) if self._begins_next else found

    def _give_up_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._early = {key: each for key, each in self._early.items() if each[1] >= now}
            late = [ahead for ahead, until in self._waiting.values() if until < now]
            self._waiting = {key: each for key, each in self._waiting.items() if each[1] >= now}
        for ahead in late:
            _give_up(ahead, self._tell, f"no proposals came within {self._patience_s:g} s")


def _complete(ahead: ScoreAhead, rows: Sequence[int], proposals: DirectProposals) -> ScoreBatch:
    """Scores to compute. A planned step is recognised by its arrays, so that these stay the same if all came."""
    own = ahead if proposals.key == ahead.channel_key else ahead.selected(rows)
    return own.with_proposals(proposals.token_ids, proposals.supports)


def _give_up(ahead: ScoreAhead, tell: _Tell, reason: str) -> None:
    batched = ahead.batched
    for session, generation in zip(batched.sessions.tolist(), batched.generations.tolist(), strict=True):
        tell(SessionLost(session, generation, reason))
