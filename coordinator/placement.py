"""Which replicas a session lives on: one target and, when it drafts, one draft.

Owns that choices and counts go together. Tells no session anything.
"""

from __future__ import annotations

from typing import TypeVar

from coordinator.planning import has_room
from coordinator.prefix_affinity import PrefixAffinity
from coordinator.replicas import Replica, Replicas
from coordinator.services import DraftReplica, Services, TargetReplica
from coordinator.speculation import DraftLengthPolicy
from coordinator.ticket import Ticket
from coordinator.turns import OfSession
from outrider.ports import DraftCommand, DraftEvent
from outrider.types import ModelDescription

CommandT = TypeVar("CommandT", bound=OfSession)
EventT = TypeVar("EventT", bound=OfSession)


class Placement:
    """Places sessions on the replicas of one coordinator."""

    def __init__(self, services: Services, policy: DraftLengthPolicy) -> None:
        self._policy = policy
        self._targets = services.target
        self._drafts: Replicas[DraftCommand, DraftEvent] | None = services.draft
        self._target_prefixes: PrefixAffinity[TargetReplica] = PrefixAffinity()
        self._draft_prefixes: PrefixAffinity[DraftReplica] = PrefixAffinity()

    def place_on_target(self, ticket: Ticket) -> bool:
        """Give it a target that could hold it and has not refused it; whether there is one.

        The one that served the longest beginning of its text is preferred, then the least loaded.
        """
        self.leave_target(ticket)
        plan = ticket.loop.plan

        def fits(description: ModelDescription) -> bool:
            return has_room(description, plan.max_length)

        preferred = _preferred(self._target_prefixes, self._targets, ticket)
        ticket.target = self._targets.choose(fits, besides=ticket.refused_by, preferred=preferred)
        if ticket.target is not None:
            self._targets.enter(ticket.target)
            self._policy.enter(ticket.loop.speculation, ticket.target)
            _note(self._target_prefixes, self._targets, ticket.target, ticket)
            ticket.num_moves += 1
        return ticket.target is not None

    def place_on_draft(self, ticket: Ticket, *, besides: DraftReplica | None = None) -> DraftReplica | None:
        """Give it a draft, chosen as targets are; ``besides`` only when there is no other."""
        self.leave_draft(ticket)
        if self._drafts is None:
            return None
        preferred = _preferred(self._draft_prefixes, self._drafts, ticket)
        avoided = () if besides is None else (besides,)
        ticket.draft = self._drafts.choose(besides=avoided, preferred=preferred) or self._drafts.choose()
        if ticket.draft is not None:
            self._drafts.enter(ticket.draft)
            _note(self._draft_prefixes, self._drafts, ticket.draft, ticket)
        return ticket.draft

    def forget_target(self, replica: TargetReplica) -> None:
        """A target is lost, and its prefix cache with it."""
        self._target_prefixes.forget(replica)

    def forget_draft(self, replica: DraftReplica) -> None:
        """A draft is lost, and its prefix cache with it."""
        self._draft_prefixes.forget(replica)

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


def _preferred(
    prefixes: PrefixAffinity[Replica[CommandT, EventT]], replicas: Replicas[CommandT, EventT], ticket: Ticket
) -> Replica[CommandT, EventT] | None:
    """The replica that served the longest beginning of a request's text; None where there is nothing to choose."""
    if len(replicas.attached) < 2:
        return None
    return prefixes.find(ticket.loop.tokens, ticket.loop.plan.cache_salt)


def _note(
    prefixes: PrefixAffinity[Replica[CommandT, EventT]],
    replicas: Replicas[CommandT, EventT],
    replica: Replica[CommandT, EventT],
    ticket: Ticket,
) -> None:
    if len(replicas.attached) > 1:
        prefixes.note(replica, ticket.loop.tokens, ticket.loop.plan.cache_salt)
