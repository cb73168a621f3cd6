"""Peers: the targets and drafts of a coordinator that talk to each other directly.

Owns both kinds of introductions: tensor planes for hidden states, and proposal channels.
"""

from __future__ import annotations

from outrider.config import CoordinatorSettings
from outrider.ports import OfferPlane, PeerEvent, PlaneChosen
from outrider_coordinator.routing.channel_introductions import ChannelIntroductions
from outrider_coordinator.routing.introductions import AnyReplica
from outrider_coordinator.routing.plane_introductions import PlaneIntroductions


class Peers:
    """Introductions of every attached target to every attached draft."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.planes = PlaneIntroductions()
        self.channels = ChannelIntroductions(
            is_enabled=settings.direct_proposals,
            between_hosts=settings.channels_between_hosts,
            draft_ahead=settings.draft_ahead,
        )
        self.plane, self.channel = self.planes.connection, self.channels.channel

    def introduce(self, target: AnyReplica, draft: AnyReplica) -> None:
        """Introduce a target to a draft, both attached."""
        self.planes.introduce(target, draft)
        self.channels.introduce(target, draft)

    def lost(self, replica: AnyReplica) -> None:
        """A replica's link has ended."""
        self.planes.lost(replica)
        self.channels.lost(replica)

    def on_event(self, replica: AnyReplica, event: PeerEvent) -> None:
        """An offer, or the state of a connection, from either side."""
        if isinstance(event, OfferPlane | PlaneChosen):
            self.planes.on_event(replica, event)
        else:
            self.channels.on_event(replica, event)

    def close(self) -> None:
        """Stop introducing services to each other."""
        self.planes.close()
        self.channels.close()
