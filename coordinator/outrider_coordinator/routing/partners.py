"""Partners: the drafts that draft for a target, as long as they are not much fuller than others.

A step of a target waits for the proposals of all its drafts, and a draft serves the steps of its targets one after the
other. So each target has drafts of its own, or all targets of a draft have that one alone. All coordinators find the
same partners, since replicas have the same names everywhere.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

from outrider_coordinator.routing.services import DraftReplica, TargetReplica

_NAME = attrgetter("name")


def partners_of(
    target: TargetReplica | None, targets: Collection[TargetReplica], drafts: Collection[DraftReplica]
) -> list[DraftReplica]:
    """Drafts on the target's device; without any, its share of those that are on no target's device.

    ``targets``, ``drafts``: those that are attached; ``target`` is one of them. Empty without target or draft.
    """
    if target is None or not drafts:
        return []
    if beside := _beside(target, drafts):
        return beside
    alone = [each for each in targets if not _beside(each, drafts)]
    apart = [draft for draft in drafts if not any(share_device(each, draft) for each in targets)]
    return _share(target, sorted(alone, key=_NAME), sorted(apart or drafts, key=_NAME))


def share_device(target: TargetReplica, draft: DraftReplica) -> bool:
    """Whether both compute on one device, as far as they say."""
    of_target, of_draft = target.description, draft.description
    return (
        of_target is not None
        and of_draft is not None
        and bool(of_draft.device_id)
        and of_target.device_id == of_draft.device_id
    )


def _beside(target: TargetReplica, drafts: Collection[DraftReplica]) -> list[DraftReplica]:
    return [draft for draft in drafts if share_device(target, draft)]


def _share(target: TargetReplica, targets: list[TargetReplica], drafts: list[DraftReplica]) -> list[DraftReplica]:
    if target not in targets:
        return drafts  # its link has just ended
    number = targets.index(target)
    return drafts[number :: len(targets)] or [drafts[number % len(drafts)]]
