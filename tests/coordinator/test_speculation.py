"""Draft lengths by request and by load."""

from __future__ import annotations

from coordinator.speculation import DraftLengthPolicy
from outrider.limits import MAX_DRAFT_LENGTH


def test_a_requests_own_length_counts_over_the_default() -> None:
    policy = DraftLengthPolicy(4)
    assert [policy.length(requested) for requested in (None, 0, 7, 10_000)] == [4, 0, 7, MAX_DRAFT_LENGTH]


def test_it_goes_off_at_the_load_and_on_below() -> None:
    policy = DraftLengthPolicy(4, disable_by_batch_size=3)
    lengths = []
    for load in (2, 3, 4, 3, 2, 0):
        policy.set_load(load)
        lengths.append(policy.length(None))
    assert lengths == [4, 0, 0, 0, 4, 4]


def test_0_never_goes_off() -> None:
    policy = DraftLengthPolicy(4)
    policy.set_load(10**6)
    assert policy.length(None) == 4
