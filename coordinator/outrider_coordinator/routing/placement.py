"""Placement of sessions: one target and, if it drafts, one draft for each.

Keeps choices and session counts consistent. Sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from outrider.errors import InvalidRequestError
from outrider.ports import DraftCommand, DraftEvent
from outrider.types import ModelDescription
from outrider_coordinator.routing.dispatch import CommandT, EventT
from outrider_coordinator.routing.partners import partners_of, share_device
from outrider_coordinator.routing.prefix_affinity import PrefixAffinity, Text
from outrider_coordinator.routing.replica import Replica
from outrider_coordinator.routing.replicas import Replicas
from outrider_coordinator.routing.services import DraftReplica, Services, TargetReplica
from outrider_coordinator.speculation import ControlledSession, DraftLengthPolicy


@dataclass(slots=True, eq=False)
class Place:
    """Place of one session, and the facts that determine it."""

    tokens: Text
    cache_salt: str
    max_length: int
    """Most tokens the session will ever hold."""
    speculation: ControlledSession
    target: TargetReplica | None = None
    """None while it does not run, or no target can hold it."""
    draft: DraftReplica | None = None
    draft_model: str = ""
    """Model of its draft, or of the last one."""
    num_moves: int = 0
    """Number of targets that it was given."""
    refused_by: set[TargetReplica] = field(default_factory=set)
    """Targets without room for it, since it was last parked or found room."""


class Placement:
    """Places sessions on the replicas of one coordinator."""

    def __init__(self, services: Services, policy: DraftLengthPolicy) -> None:
        self._policy = policy
        self._targets = services.target
        self._drafts: Replicas[DraftCommand, DraftEvent] | None = services.draft
        self.target_prefixes: PrefixAffinity[TargetReplica] = PrefixAffinity()
        self._draft_prefixes: PrefixAffinity[DraftReplica] = PrefixAffinity()

    def place_on_target(self, place: Place) -> bool:
        """Choose a target that could hold the session and has not refused it; return whether there is one.

        The target that served the longest prefix of its text is preferred, then the least loaded one.
        """
        self.leave_target(place)
        preferred = _with_prefix(self.target_prefixes, self._targets, place)
        place.target = self._targets.choose(
            lambda target: not _trouble(target, place.max_length), besides=place.refused_by, preferred=preferred
        )
        if place.target is not None:
            place.target.num_sessions += 1
            drafts = () if self._drafts is None else self._drafts.descriptions
            self._policy.enter(
                place.speculation,
                place.target,
                target_costs=() if place.target.description is None else place.target.description.step_costs,
                draft_costs=next((found.step_costs for found in drafts if found.step_costs), ()),
            )
            _note(self.target_prefixes, self._targets, place.target, place)
            place.num_moves += 1
        return place.target is not None

    def place_on_draft(self, place: Place, *, besides: DraftReplica | None = None) -> DraftReplica | None:
        """Choose a draft; ``besides`` only if there is no other.

        One of the target's partners is preferred, of these the one that served the longest prefix, then the least
        loaded one. Partners on the target's device are passed over only if they refuse the session.
        """
        self.leave_draft(place)
        if self._drafts is None:
            return None
        partners = partners_of(place.target, self._targets.known, self._drafts.known)
        with_prefix = [each for each in _with_prefix(self._draft_prefixes, self._drafts, place) if each in partners]
        preferred = with_prefix + sorted(partners, key=attrgetter("load"))
        refused = () if besides is None else (besides,)
        has_own = place.target is not None and any(share_device(place.target, each) for each in partners)
        elsewhere = [each for each in self._drafts.attached if has_own and each not in partners]
        place.draft = (
            self._drafts.choose(besides=(*refused, *elsewhere), preferred=preferred)
            or self._drafts.choose(besides=refused)
            or self._drafts.choose()
        )
        if place.draft is not None:
            place.draft.num_sessions += 1
            place.draft_model = "" if (found := place.draft.description) is None else found.model_name
            _note(self._draft_prefixes, self._drafts, place.draft, place)
        return place.draft

    def remove_target(self, replica: TargetReplica) -> None:
        """A target is lost, with its prefix cache."""
        self.target_prefixes.remove(replica)
        self._policy.remove_target(replica)

    def remove_draft(self, replica: DraftReplica) -> None:
        """A draft is lost, with its prefix cache."""
        self._draft_prefixes.remove(replica)

    def leave_target(self, place: Place) -> None:
        """Remove the session from its target."""
        replica, place.target = place.target, None
        if replica is not None:
            self._policy.leave(place.speculation)
            self._targets.leave(replica)

    def leave_draft(self, place: Place) -> None:
        """Remove the session from its draft."""
        replica, place.draft = place.draft, None
        if replica is not None and self._drafts is not None:
            self._drafts.leave(replica)

    def leave(self, place: Place) -> None:
        """Remove the session from both."""
        self.leave_target(place)
        self.leave_draft(place)


def _with_prefix(
    prefixes: PrefixAffinity[Replica[CommandT, EventT]], replicas: Replicas[CommandT, EventT], place: Place
) -> list[Replica[CommandT, EventT]]:
    """The replica that served the longest beginning of a request's text; none where there is nothing to choose."""
    found = prefixes.find(place.tokens, place.cache_salt) if len(replicas.attached) > 1 else None
    return [] if found is None else [found]


def _note(
    prefixes: PrefixAffinity[Replica[CommandT, EventT]],
    replicas: Replicas[CommandT, EventT],
    replica: Replica[CommandT, EventT],
    place: Place,
) -> None:
    if len(replicas.attached) > 1:
        prefixes.note(replica, place.tokens, place.cache_salt)


def check_capacity(target: ModelDescription, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raise ``InvalidRequestError`` if an empty target could not hold this number of tokens."""
    if trouble := _trouble(target, num_prompt_tokens + max_tokens):
        raise InvalidRequestError("max_tokens", f"{num_prompt_tokens} prompt tokens and {max_tokens} more {trouble}")


def capacity(target: ModelDescription) -> int:
    """Maximum number of tokens of one session on the target."""
    return min(target.max_model_len, target.num_pages * target.page_size or target.max_model_len)


def _trouble(target: ModelDescription, length: int) -> str:
    """Reason why an empty target could not hold this number of tokens; empty if it could."""
    needed = -(-length // target.page_size) if target.page_size else 0
    if needed > target.num_pages:
        return f"need {needed} KV pages, and the target has {target.num_pages} in all"
    return f"are {length}, and the target takes {target.max_model_len}" if length > target.max_model_len else ""
