"""Three tokens follow the target's exact joint distribution, through the real loop, whatever the draft.

100,000 draws a case: long sessions over a language of blocks, so that proposals begin at every place of a block.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from outrider.randomness import scalar
from outrider.randomness.streams import Stream
from outrider.types import AcceptanceMethod
from tests.coordinator.blocks import BlockDraft, BlockTarget, Held, Language, LookupDraft, Rows
from tests.coordinator.driving import Bench, Core, make_plan

VOCAB_SIZE = 4
BLOCK = 3
NUM_BLOCKS = 100
FEW_DRAWS = 5_000
"""Draws that suffice for the negative controls to fail by far."""
DRAFT_LENGTH = 4
LANGUAGE = Language(VOCAB_SIZE, period=BLOCK, sharpness=0.7)


def softened(logits: Rows) -> Rows:
    return np.asarray(logits * np.float32(0.8))


def reversed_ranking(logits: Rows) -> Rows:
    flipped = np.empty_like(logits)
    flipped[np.argsort(logits)] = np.sort(logits)[::-1]
    return flipped


GOOD, BAD = LANGUAGE.changed(softened), LANGUAGE.changed(reversed_ranking)
REJECTION, COUPLED = AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED
Counts = NDArray[np.int64]  # [V ** BLOCK]


def observe(draft: Core, method: AcceptanceMethod, seeds: Sequence[int]) -> Counts:
    """Counts of each block as drawn by one session for each seed."""
    bench = Bench(BlockTarget(LANGUAGE), draft, draft_length=DRAFT_LENGTH)
    max_tokens = BLOCK * NUM_BLOCKS
    sessions = [
        bench.add(make_plan(vocab_size=VOCAB_SIZE, max_tokens=max_tokens, method=method, seed=seed)) for seed in seeds
    ]
    bench.run()
    blocks = np.array([session.token_ids for session in sessions]).reshape(-1, BLOCK)
    assert len(blocks) == NUM_BLOCKS * len(seeds)
    assert sum(session.loop.spec_stats.num_draft_tokens for session in sessions) > len(blocks)  # it did speculate
    return np.bincount(blocks @ (VOCAB_SIZE ** np.arange(BLOCK)[::-1]), minlength=VOCAB_SIZE**BLOCK)


def p_value(
    draft: Core,
    method: AcceptanceMethod,
    *,
    num_draws: int,
    workers: ProcessPoolExecutor | None = None,
) -> float:
    """P-value of the hypothesis that blocks are drawn from the language's joint distribution."""
    seeds = range(num_draws // NUM_BLOCKS)
    if workers is None:
        observed = observe(draft, method, seeds)
    else:
        halves = [workers.submit(observe, draft, method, seeds[half::2]) for half in (0, 1)]
        observed = np.add(*(half.result() for half in halves))
    expected = LANGUAGE.joint(BLOCK) * num_draws
    assert observed.sum() == num_draws
    assert expected.min() > 5, "cells too thin for a chi-square test"
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Two processes, which halve the wait where there are two cores."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute of two cores, which may be shared
@pytest.mark.parametrize(
    ("draft", "method"),
    [
        pytest.param(BlockDraft(GOOD, support=3), REJECTION, id="sparse, good draft, support cut"),
        pytest.param(BlockDraft(BAD), REJECTION, id="sparse, reversed draft"),
        pytest.param(LookupDraft(LANGUAGE), REJECTION, id="sparse, n-gram"),
        pytest.param(BlockDraft(GOOD), COUPLED, id="coupled, good draft"),
    ],
)
def test_a_hundred_thousand_draws_follow_the_joint_distribution(
    draft: Core, method: AcceptanceMethod, workers: ProcessPoolExecutor
) -> None:
    assert p_value(draft, method, num_draws=100_000, workers=workers) > 1e-3


@pytest.mark.parametrize(
    ("draft", "method"),
    [
        pytest.param(BlockDraft(BAD), COUPLED, id="coupled, reversed draft"),
    ],
)
def test_other_pairs_follow_the_joint_distribution(draft: Core, method: AcceptanceMethod) -> None:
    assert p_value(draft, method, num_draws=FEW_DRAWS) > 1e-3


class TransformDraft(BlockDraft):
    """Draws through the inverse of the running sum, with one number of a stream."""

    stream = Stream.PROPOSAL

    def _draw(self, logs: Rows, sessions: Sequence[Held], bases: Sequence[int]) -> tuple[Rows, NDArray[np.int64]]:
        probs = self.report(logs)
        coins = [
            scalar.coin(held.open.seed, self.stream, base, len(held.tokens))
            for held, base in zip(sessions, bases, strict=True)
        ]
        return probs, (probs.cumsum(axis=1) > np.array(coins)[:, None]).argmax(axis=1)


class SharingDraft(TransformDraft):
    """Draws its tokens with the very number that the coordinator will draw the residual with."""

    stream = Stream.RESIDUAL


class MisreportingDraft(BlockDraft):
    """Says that it drew from a sharper distribution than it did."""

    def _draw(self, logs: Rows, sessions: Sequence[Held], bases: Sequence[int]) -> tuple[Rows, NDArray[np.int64]]:
        _, tokens = super()._draw(logs, sessions, bases)
        return self.report(logs * np.float32(1.5)), tokens


@pytest.mark.parametrize("draft", [SharingDraft(BAD), MisreportingDraft(GOOD)], ids=["sharing", "misreporting"])
def test_negative_controls_are_caught(draft: BlockDraft) -> None:
    assert p_value(draft, REJECTION, num_draws=FEW_DRAWS) < 1e-6


def test_the_sharing_control_fails_for_its_stream_alone() -> None:
    assert p_value(TransformDraft(BAD), REJECTION, num_draws=FEW_DRAWS) > 1e-3
