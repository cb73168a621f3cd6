"""Which replicas a session lives on: one target and, when it drafts, one draft.

Owns that choices and counts go together. Tells no session anything.
"""

from __future__ import annotations

from typing import TypeVar

from outrider.ports import DraftCommand, DraftEvent
from outrider.types import ModelDescription
from outrider_coordinator.requests.input_processor import has_room
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.dispatch import OfSession
from outrider_coordinator.routing.prefix_affinity import PrefixAffinity
from outrider_coordinator.routing.replicas import Replica, Replicas
from outrider_coordinator.routing.services import DraftReplica, Services, TargetReplica
from outrider_coordinator.speculation import DraftLengthPolicy

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

    def place_on_target(self, request_state: RequestState) -> bool:
        """Give it a target that could hold it and has not refused it; whether there is one.

        The one that served the longest beginning of its text is preferred, then the least loaded.
        """
        self.leave_target(request_state)
        plan = request_state.loop.plan

        def fits(description: ModelDescription) -> bool:
            return has_room(description, plan.max_length)

        preferred = _preferred(self._target_prefixes, self._targets, request_state)
        request_state.target = self._targets.choose(fits, besides=request_state.refused_by, preferred=preferred)
        if request_state.target is not None:
            self._targets.enter(request_state.target)
            self._policy.enter(request_state.loop.speculation, request_state.target)
            _note(self._target_prefixes, self._targets, request_state.target, request_state)
            request_state.num_moves += 1
        return request_state.target is not None

    def place_on_draft(
        self, request_state: RequestState, *, besides: DraftReplica | None = None
    ) -> DraftReplica | None:
        """Give it a draft, chosen as targets are; ``besides`` only when there is no other."""
        self.leave_draft(request_state)
        if self._drafts is None:
            return None
        preferred = _preferred(self._draft_prefixes, self._drafts, request_state)
        avoided = () if besides is None else (besides,)
        request_state.draft = self._drafts.choose(besides=avoided, preferred=preferred) or self._drafts.choose()
        if request_state.draft is not None:
            self._drafts.enter(request_state.draft)
            _note(self._draft_prefixes, self._drafts, request_state.draft, request_state)
        return request_state.draft

    def forget_target(self, replica: TargetReplica) -> None:
        """A target is lost, and its prefix cache with it."""
        self._target_prefixes.forget(replica)

    def forget_draft(self, replica: DraftReplica) -> None:
        """A draft is lost, and its prefix cache with it."""
        self._draft_prefixes.forget(replica)

    def leave_target(self, request_state: RequestState) -> None:
        """It lives on no target any more."""
        replica, request_state.target = request_state.target, None
        if replica is not None:
            self._policy.leave(request_state.loop.speculation)
            self._targets.leave(replica)

    def leave_draft(self, request_state: RequestState) -> None:
        """It lives on no draft any more."""
        replica, request_state.draft = request_state.draft, None
        if replica is not None and self._drafts is not None:
            self._drafts.leave(replica)

    def leave(self, request_state: RequestState) -> None:
        """It lives nowhere any more."""
        self.leave_target(request_state)
        self.leave_draft(request_state)


def _preferred(
    prefixes: PrefixAffinity[Replica[CommandT, EventT]],
    replicas: Replicas[CommandT, EventT],
    request_state: RequestState,
) -> Replica[CommandT, EventT] | None:
    """The replica that served the longest beginning of a request's text; None where there is nothing to choose."""
    if len(replicas.attached) < 2:
        return None
    return prefixes.find(request_state.loop.tokens, request_state.loop.plan.cache_salt)


def _note(
    prefixes: PrefixAffinity[Replica[CommandT, EventT]],
    replicas: Replicas[CommandT, EventT],
    replica: Replica[CommandT, EventT],
    request_state: RequestState,
) -> None:
    if len(replicas.attached) > 1:
        prefixes.note(replica, request_state.loop.tokens, request_state.loop.plan.cache_salt)
