"""Output that was interrupted at random and resumed follows the target's exact joint distribution under rejection.

Short sessions over a language of blocks, each interrupted after random steps; what was computed and never delivered is
lost. See docs/exactness.md for why this is exact, and for what it takes of the interruptions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from outrider.types import AcceptanceMethod
from outrider_coordinator.session.engine_request import EngineRequest
from tests.coordinator import blocks
from tests.coordinator.acceptance.test_joint_distribution import (
    BAD,
    BLOCK,
    DRAFT_LENGTH,
    GOOD,
    LANGUAGE,
    REJECTION,
    VOCAB_SIZE,
)
from tests.coordinator.blocks import BlockDraft, BlockTarget, LookupDraft
from tests.coordinator.driving import Bench, Core, Driven, make_plan
from tests.support.statistics import chi_square_p

NUM_TOKENS = 2 * BLOCK
CHANCE = 0.5
NUM_DRAWS, FEW_DRAWS = 20_000, 3_000

Lost = list[int]
"""Tokens of a step that was computed and is not delivered; empty between steps."""
Interrupts = Callable[[random.Random, Lost], bool]


def at_random(rng: random.Random, lost: Lost) -> bool:
    """Interrupts at random, whatever was computed meanwhile."""
    return rng.random() < CHANCE


def by_what_was_lost(rng: random.Random, lost: Lost) -> bool:
    """No interruption from outside: it looks at tokens that nobody was given."""
    return lost[:1] == [0] and rng.random() < 0.9


@dataclass
class Stream:
    """Client's view of one generation, over as many sessions as it took."""

    plan: EngineRequest
    driven: Driven
    rng: random.Random
    delivered: list[int] = field(default_factory=list)
    num_resumed: int = 0

    def step(self, bench: Bench, interrupts: Interrupts) -> None:
        """Deliver what the session's last step brought, or lose it and resume from what was delivered."""
        news = self.driven.token_ids[len(self.delivered) - len(self.driven.loop.engine_request.emitted_token_ids) :]
        if not news:
            return
        if interrupts(self.rng, news):
            self.resume(bench)
            return
        self.delivered += news
        if len(self.delivered) < NUM_TOKENS and interrupts(self.rng, []):
            self.resume(bench)

    def resume(self, bench: Bench) -> None:
        bench.tell(self.driven, lambda loop: loop.cancel())
        self.driven = bench.add(replace(self.plan, emitted_token_ids=tuple(self.delivered)))
        self.num_resumed += 1


def observe(draft: Core, seeds: Sequence[int], *, method: AcceptanceMethod, interrupts: Interrupts) -> list[Stream]:
    bench = Bench(BlockTarget(LANGUAGE), draft, draft_length=DRAFT_LENGTH)
    plans = [make_plan(vocab_size=VOCAB_SIZE, max_tokens=NUM_TOKENS, method=method, seed=seed) for seed in seeds]
    streams = [Stream(plan, bench.add(plan), random.Random(plan.seed)) for plan in plans]
    while running := [stream for stream in streams if len(stream.delivered) < NUM_TOKENS]:
        bench.round()
        for stream in running:
            stream.step(bench, interrupts)
    return streams


def p_value(
    draft: Core,
    *,
    method: AcceptanceMethod = REJECTION,
    interrupts: Interrupts = at_random,
    num_draws: int = FEW_DRAWS,
) -> float:
    """P-value of the hypothesis that blocks are drawn from the language's joint distribution."""
    seeds = range(num_draws * BLOCK // NUM_TOKENS)
    streams = observe(draft, seeds, method=method, interrupts=interrupts)
    assert sum(stream.num_resumed for stream in streams) > len(streams) / 4
    drawn = np.array([stream.delivered for stream in streams]).reshape(-1, BLOCK)
    observed = np.bincount(drawn @ (VOCAB_SIZE ** np.arange(BLOCK)[::-1]), minlength=VOCAB_SIZE**BLOCK)
    return chi_square_p(observed, LANGUAGE.joint(BLOCK))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(BlockDraft(GOOD, support=3), id="sparse, good draft, support cut"),
        pytest.param(BlockDraft(BAD), id="sparse, reversed draft"),
        pytest.param(LookupDraft(LANGUAGE), id="sparse, n-gram"),
    ],
)
def test_resumed_output_follows_the_joint_distribution(draft: Core) -> None:
    assert p_value(draft, num_draws=NUM_DRAWS) > 1e-3


def test_fewer_draws_do_too() -> None:
    assert p_value(BlockDraft(BAD)) > 1e-3


def test_resumed_coupled_output_is_that_of_one_session() -> None:
    streams = observe(BlockDraft(GOOD), range(200), method=AcceptanceMethod.COUPLED, interrupts=at_random)
    for stream in streams:
        bench = Bench(BlockTarget(LANGUAGE))
        alone = bench.add(stream.plan)
        bench.run()
        assert stream.delivered == alone.token_ids
    assert sum(stream.num_resumed for stream in streams) > 100


@pytest.mark.integration
def test_counting_positions_from_the_seam_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault to fear: the resumed part draws with numbers that the delivered part was drawn with."""
    noise, seams = blocks.noise_of, dict[int, int]()

    def from_the_seam(keys: Sequence[tuple[int, int, int]], *rest: object) -> object:
        shifted = [(seed, base - seams.get(seed, 0), position - seams.get(seed, 0)) for seed, base, position in keys]
        return noise(shifted, *rest)  # type: ignore[arg-type]

    def resume(stream: Stream, bench: Bench) -> None:
        original(stream, bench)
        seams[stream.plan.seed] = len(stream.delivered)

    original = Stream.resume
    monkeypatch.setattr(blocks, "noise_of", from_the_seam)
    monkeypatch.setattr(Stream, "resume", resume)
    assert p_value(BlockDraft(BAD)) < 1e-6


@pytest.mark.integration
def test_interruptions_that_look_at_what_is_lost_are_caught() -> None:
    """Condition of exactness, no fault of the loop: losing output for its content is choosing output."""
    assert p_value(BlockDraft(BAD), interrupts=by_what_was_lost) < 1e-6
