"""Introductions of drafts to targets, so that proposals are scored without passing through here first.

Whatever fails, the coordinator brings the proposals.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from outrider.addresses import is_loopback, split_address
from outrider.config.fields import DraftAhead
from outrider.ports import ChannelState, CloseChannel, OfferChannel, RequestChannel
from outrider.types import ModelDescription, PeerAddress
from outrider_coordinator.routing.introductions import RETRY_S, AnyReplica, Introduction, Introductions, name_of

_log = logging.getLogger(__name__)


class ChannelIntroductions(Introductions[bool]):
    """All pairs of one coordinator that may have a proposal channel; a pair's state is whether it is open."""

    ending = CloseChannel

    def __init__(
        self, *, is_enabled: bool, between_hosts: bool = False, draft_ahead: DraftAhead = DraftAhead.VERDICT
    ) -> None:
        """``is_enabled``: False: no pair is introduced. ``between_hosts``: pairs of different hosts are too.
        ``draft_ahead``: what a draft begins before it is asked.
        """
        super().__init__(nothing_yet=False)
        self._is_enabled, self._between_hosts, self._draft_ahead = is_enabled, between_hosts, draft_ahead
        self._ahead: set[object] = set()
        """Targets whose drafts go on by themselves, where that is chosen."""

    def channel(self, target: AnyReplica | None, draft: AnyReplica | None) -> int:
        """The number of the connection by which a draft's proposals reach a target; 0: none is open."""
        found = self._found(target, draft)
        return found.connection if found is not None and found.state else 0

    def take_order(self, target: object, is_ahead: bool) -> None:
        """Have a target and its drafts go on by themselves, or take turns: by a new connection of each pair. Meanwhile
        proposals come through here.
        """
        own = [found for found in self._pairs.values() if found.target is target]
        before = [self._is_chained(found) for found in own]
        (self._ahead.add if is_ahead else self._ahead.discard)(target)
        for found, was_chained in zip(own, before, strict=True):
            if found.connection and self._is_chained(found) != was_chained:
                self._drop(found)
                found.state = False
                self.introduce(found.target, found.draft)

    def lost(self, replica: AnyReplica) -> None:
        """A replica's link has ended."""
        self._ahead.discard(replica)
        super().lost(replica)

    @property
    def num_open(self) -> int:
        """Channels that are open."""
        return sum(found.state for found in self._pairs.values())

    @property
    def num_ahead(self) -> int:
        """Open channels whose draft and target go on by themselves."""
        return sum(found.state and self._is_chained(found) for found in self._pairs.values())

    def on_event(self, replica: AnyReplica, event: OfferChannel | ChannelState) -> None:
        """A target's offer, or what either side says of a channel."""
        found = self._introduction(replica, event.connection)
        if found is None:
            return
        if isinstance(event, OfferChannel):
            if replica is found.target:
                address = _remote_address(found.target.description, found.draft.description)
                offer = replace(event, is_chained=self._is_chained(found), target=address)
                found.draft.send_alone(offer)
            return
        found.state = event.is_open
        names = name_of(found.draft), name_of(found.target)
        if event.is_open:
            found.retry_s = RETRY_S
            _log.info("proposals go from %s to %s directly", *names)
        else:
            _log.info("proposals from %s to %s do not go directly: %s", *names, event.reason)
            self._try_again(found)

    def _is_chained(self, found: Introduction[bool]) -> bool:
        """False on one GPU, where a draft that goes on would take the target's time."""
        target, draft = found.target.description, found.draft.description
        device = "" if target is None or draft is None or target.device_id != draft.device_id else target.device_id
        is_chosen = self._draft_ahead is DraftAhead.AUTO and found.target in self._ahead
        return (is_chosen or self._draft_ahead is DraftAhead.CHAIN) and not device

    def _may_meet(self, target: ModelDescription, draft: ModelDescription) -> bool:
        if not (self._is_enabled and target.channel_host and draft.channel_host):
            return False
        if target.channel_host == draft.channel_host:
            return True
        address = target.peer_address if self._between_hosts else None
        if address is not None and is_loopback(split_address(address.address)[0]):
            _log.warning(
                "a draft of another host is told to reach its target at %s, which is that draft's own host:"
                " target_address should be one that drafts reach too",
                address.address,
            )
        return address is not None

    def _request(self, connection: int) -> RequestChannel:
        wants_verdicts = self._draft_ahead is not DraftAhead.IN_TURN
        is_chained = any(self._is_chained(each) for each in self._pairs.values() if each.connection == connection)
        return RequestChannel(connection, wants_verdicts, begins_next=is_chained)


def _remote_address(target: ModelDescription | None, draft: ModelDescription | None) -> PeerAddress | None:
    """Address of a target for a draft of another host; None where both reach each other by loopback."""
    if target is None or draft is None or target.channel_host == draft.channel_host:
        return None
    return target.peer_address
