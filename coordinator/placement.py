"""Which replicas a session lives on: one target and, when it drafts, one draft.

Owns that choices and counts go together. Tells no session anything.
"""

from __future__ import annotations

from coordinator.planning import has_room
from coordinator.replicas import Replicas
from coordinator.services import DraftReplica, Services
from coordinator.speculation import DraftLengthPolicy
from coordinator.ticket import Ticket
from outrider.ports import DraftCommand, DraftEvent
from outrider.types import ModelDescription


class Placement:
    """Places sessions on the replicas of one coordinator."""

    def __init__(self, services: Services, policy: DraftLengthPolicy) -> None:
        self._policy = policy
        self._targets = services.target
        self._drafts: Replicas[DraftCommand, DraftEvent] | None = services.draft

    def place_on_target(self, ticket: Ticket) -> bool:
        """Give it the least loaded target that could hold it and has not refused it; whether there is one."""
        self.leave_target(ticket)
        plan = ticket.loop.plan

        def fits(description: ModelDescription) -> bool:
            return has_room(description, plan.max_length)

        ticket.target = self._targets.choose(fits, besides=ticket.refused_by)
        if ticket.target is not None:
            self._targets.enter(ticket.target)
            self._policy.enter(ticket.loop.speculation, ticket.target)
            ticket.num_moves += 1
        return ticket.target is not None

    def place_on_draft(self, ticket: Ticket, *, besides: DraftReplica | None = None) -> DraftReplica | None:
        """Give it the least loaded draft, ``besides`` only when there is no other."""
        self.leave_draft(ticket)
        if self._drafts is None:
            return None
        ticket.draft = self._drafts.choose(besides=() if besides is None else (besides,)) or self._drafts.choose()
        if ticket.draft is not None:
            self._drafts.enter(ticket.draft)
        return ticket.draft

    def leave_target(self, ticket: Ticket) -> None:
        """It lives on no target any more."""
        replica, ticket.target = ticket.target, None
        if replica is not None:
            self._policy.leave(ticket.loop.speculation)
            self._targets.leave(replica)

    def leave_draft(self, ticket: Ticket) -> None:
        """It lives on no draft any more."""
        replica, ticket.draft = ticket.draft, None
        if replica is not None and self._drafts is not None:
            self._drafts.leave(replica)

    def leave(self, ticket: Ticket) -> None:
        """It lives nowhere any more."""
        self.leave_target(ticket)
        self.leave_draft(ticket)
