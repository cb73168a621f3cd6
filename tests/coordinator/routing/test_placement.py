"""Placement keeps what is known of targets: their prefix caches, and the draft lengths that are learned there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider_coordinator.routing.placement import Placement
from outrider_coordinator.speculation import DraftLengthPolicy


def test_nothing_learned_of_a_target_outlives_its_loss() -> None:
    policy = DraftLengthPolicy(4, is_controlled=True)
    services: Any = SimpleNamespace(target=None, draft=None)
    lost: Any = object()
    policy.enter(policy.session(None), lost)
    policy.enter(policy.session(None), "another")
    Placement(services, policy).forget_target(lost)
    assert policy.controller(lost) is None
    assert policy.controller("another") is not None
