"""Replica of a request when several have served texts with its prefix, and what placement forgets of a lost one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider_coordinator.routing.placement import Placement
from outrider_coordinator.routing.prefix_affinity import PrefixAffinity
from outrider_coordinator.session.committed_tokens import CommittedTokens
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.routing.fleet import Found, ask, draft, eventually, fleet, num_held, target

TEXT = tuple(position % 8 for position in range(600))


def test_the_longest_beginning_counts() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    affinity.note("first", CommittedTokens(TEXT), "")
    affinity.note("second", CommittedTokens((*TEXT[:100], 7, 7, *TEXT[:300])), "")
    assert affinity.find(CommittedTokens((*TEXT[:550], 1, 1)), "") == "first"
    assert affinity.find(CommittedTokens((*TEXT[:100], 7, 7, *TEXT[:200])), "") == "second"
    assert affinity.find(CommittedTokens(TEXT[:17]), "") == "second"  # the last that served it
    assert affinity.find(CommittedTokens(TEXT[:16]), "") is None  # less than one step is not told apart
    assert affinity.find(CommittedTokens((9, *TEXT)), "") is None


def test_salts_are_kept_apart_and_a_lost_replica_is_forgotten() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    affinity.note("first", CommittedTokens(TEXT), "one")
    affinity.note("second", CommittedTokens(TEXT), "two")
    assert [affinity.find(CommittedTokens(TEXT), salt) for salt in ("one", "two", "")] == ["first", "second", None]
    affinity.remove("first")
    assert [affinity.find(CommittedTokens(TEXT), salt) for salt in ("one", "two")] == [None, "second"]


def test_memory_is_bounded_and_the_latest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_coordinator.routing.prefix_affinity.MAX_ENTRIES", 100)
    affinity: PrefixAffinity[int] = PrefixAffinity()
    for number in range(50):
        affinity.note(number, CommittedTokens((number, *TEXT)), "")
    assert len(affinity) == 100
    assert affinity.find(CommittedTokens((0, *TEXT)), "") is None
    assert affinity.find(CommittedTokens((49, *TEXT)), "") == 49


async def test_requests_of_one_prompt_go_where_it_was_served_unless_that_is_much_fuller() -> None:
    targets, drafts = [target(num_pages=4096), target(num_pages=4096)], [draft(num_pages=4096), draft(num_pages=4096)]
    long = ask(prompt_token_ids=TEXT[:64], max_tokens=100)
    async with fleet(Found(*targets), Found(*drafts)) as made:
        await eventually(lambda: made.is_attached(2, 2))
        streams = [made.stream(long)]
        await streams[0].read(3)
        home = [replica for replica in (*targets, *drafts) if num_held(replica)]
        assert len(home) == 2
        for _ in range(4):
            streams.append(made.stream(long))
            await streams[-1].read(3)
            assert [replica for replica in (*targets, *drafts) if num_held(replica)] == home
        await made.stream(ask()).finish()  # nothing in common: the emptier ones
        streams.append(made.stream(long))
        await streams[-1].read(3)
        assert all(num_held(replica) for replica in (*targets, *drafts))
        for stream in streams:
            await stream.finish()
        await eventually(made.is_free)


async def test_a_lost_replica_is_not_preferred_when_it_is_back() -> None:
    first, second = target(), target()
    long = ask(prompt_token_ids=TEXT[:64], max_tokens=100)
    async with fleet(Found(first, second)) as made:
        await eventually(lambda: made.is_attached(2))
        await made.run(long)
        for replica in (first, second):
            replica.break_links("restarted")
        await eventually(lambda: not len(made.coordinator.driver.placement.target_prefixes))
        await eventually(lambda: made.is_attached(2))


def test_nothing_learned_of_a_target_outlives_its_loss() -> None:
    policy = DraftLengthPolicy(4, is_controlled=True)
    services: Any = SimpleNamespace(target=None, draft=None)
    lost: Any = object()
    policy.enter(policy.session(None), lost)
    policy.enter(policy.session(None), "another")
    Placement(services, policy).remove_target(lost)
    assert policy.controllers.get(lost) is None
    assert policy.controllers.get("another") is not None
