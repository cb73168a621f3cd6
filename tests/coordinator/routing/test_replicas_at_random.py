"""Replicas that break, vanish, come back, refuse and forget in random order: every request gives its own tokens."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from outrider.generation import GenerationRequest
from outrider.types import AcceptanceMethod
from tests.coordinator.routing.fleet import Fleet, Found, ask, draft, eventually, fleet, own_tokens, target

NUM_REQUESTS = 12
NUM_EVENTS = 60


def requests(rng: random.Random) -> list[GenerationRequest]:
    """Greedy and coupled: those whose tokens depend on nothing that a service does."""
    return [
        ask(
            max_tokens=rng.choice([20, 80, 200]),
            seed=number,
            temperature=rng.choice([0.0, 1.0]),
            acceptance_method=AcceptanceMethod.COUPLED,
        )
        for number in range(NUM_REQUESTS)
    ]


class Mischief:
    """Faults of one replica after the other, all of which are mended in the end."""

    def __init__(self, rng: random.Random, *sides: Found) -> None:
        self._rng = rng
        self._sides = [(side, dict(side.listed)) for side in sides]

    async def run(self) -> None:
        for _ in range(NUM_EVENTS):
            for _ in range(self._rng.randrange(40)):
                await asyncio.sleep(0)
            side, toys = self._rng.choice(self._sides)
            name = self._rng.choice(sorted(toys))
            self._do(self._rng.randrange(7), side, name, toys[name])
        for side, toys in self._sides:
            side.listed.update(toys)
            for toy in toys.values():
                toy.faults.unreachable, toy.faults.refuse = False, 0

    def _do(self, deed: int, side: Found, name: str, toy: Any) -> None:
        if deed in (0, 1):
            toy.faults.unreachable = deed == 1
            toy.break_links()
        elif deed == 2:
            toy.faults.unreachable = False
        elif deed == 3:
            side.listed.pop(name, None)
        elif deed == 4:
            side.listed[name] = toy
        elif deed == 5:
            toy.faults.refuse = self._rng.randrange(3)
        else:
            toy.faults.lose = 1


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_to_replicas_no_token_changes_and_nothing_is_left_behind(seed: int) -> None:
    rng = random.Random(seed)
    asked = requests(rng)
    expected = [await own_tokens(request) for request in asked]
    targets = Found(*(target(num_pages=rng.choice([200, 1000])) for _ in range(3)))
    drafts = Found(*(draft(num_pages=rng.choice([120, 1000])) for _ in range(2)))
    async with fleet(targets, drafts, max_running_requests=8) as made:
        mischief = asyncio.create_task(Mischief(rng, targets, drafts).run())
        results = await asyncio.gather(*(made.run(request) for request in asked))
        await mischief
        assert [result.token_ids for result in results] == expected
        await eventually(made.is_free)
        assert num_sessions(made) == 0


def num_sessions(made: Fleet) -> int:
    """Number of sessions by the coordinator's own books."""
    services = made.coordinator.services
    assert services.draft is not None
    on_targets = sum(replica.num_sessions for replica in services.target.known)
    return on_targets + sum(replica.num_sessions for replica in services.draft.known)
