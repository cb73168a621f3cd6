"""Partners: the drafts that draft for a target.

A step of a target waits for the proposals of all its drafts, and a draft serves the steps of its targets one after the
other. So each target has drafts of its own, or all targets of a draft have that one alone. All coordinators find the
same partners, since replicas have the same names everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from outrider_coordinator.routing.services import DraftReplica, TargetReplica


def partners_of(
    target: TargetReplica | None, targets: Collection[TargetReplica], drafts: Collection[DraftReplica]
) -> list[DraftReplica]:
    """Drafts for a target's new sessions; empty without a target, or if no draft takes sessions.

    The first of these with a draft that takes sessions: the drafts on the target's device, its share of those on its
    host, its share of those that are on no target's device and on the host of no target without a draft on its device,
    its share of all. If none of a share takes sessions, the others that are shared out replace it.

    ``targets``, ``drafts``: all known replicas. One that is lost keeps its place in the order, so that the shares of
    the others stay the same.
    """
    if target is None:
        return []
    ordered = sorted(drafts, key=_order)
    beside = [draft for draft in ordered if share_device(target, draft)]
    free = [draft for draft in ordered if not any(share_device(each, draft) for each in targets)]
    alone = [each for each in sorted(targets, key=_order) if not any(share_device(each, draft) for draft in drafts)]
    near = [draft for draft in free if share_host(target, draft)]
    neighbors = [each for each in alone if share_host(target, each)]
    far = [draft for draft in free if not any(share_host(each, draft) for each in alone)]
    others = [each for each in alone if not any(share_host(each, draft) for draft in free)]
    for shared, among in ((beside, [target]), (near, neighbors), (far, others), (ordered, others)):
        if found := _that_take_sessions(_share(target, among, shared)) or _that_take_sessions(shared):
            return found
    return []


def share_device(target: TargetReplica, draft: DraftReplica) -> bool:
    """True if both compute on one device, as far as they say."""
    return _say_the_same("device_id", target, draft)


def share_host(one: TargetReplica, other: TargetReplica | DraftReplica) -> bool:
    """True if both are on one host, as far as they say."""
    return _say_the_same("channel_host", one, other)


def _say_the_same(place: str, one: TargetReplica, other: TargetReplica | DraftReplica) -> bool:
    """True if a place stands in both descriptions, and is the same."""
    places = [getattr(each.description, place, "") for each in (one, other)]
    return bool(places[0]) and places[0] == places[1]


def _order(replica: TargetReplica | DraftReplica) -> tuple[str, int, str]:
    """Sort key: host, then port as a number; a name without a port is its own host."""
    host, _, port = replica.name.rpartition(":")
    return (host, int(port), replica.name) if port.isdecimal() else (replica.name, -1, replica.name)


def _that_take_sessions(drafts: Iterable[DraftReplica]) -> list[DraftReplica]:
    return [draft for draft in drafts if draft.is_up and draft.is_listed]


def _share(target: TargetReplica, targets: list[TargetReplica], drafts: list[DraftReplica]) -> list[DraftReplica]:
    if target not in targets or not drafts:
        return []
    number = targets.index(target)
    return drafts[number :: len(targets)] or [drafts[number % len(drafts)]]
