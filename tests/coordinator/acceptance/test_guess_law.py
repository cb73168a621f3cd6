"""Law of rejection with continuations that were drawn on a guess of the bonus token, over the streams of services.

Each seed is a session over a language in which a token depends on the one before it. A step's draft tokens are judged,
the bonus is the race of the target's stream, and the guess is the draft's race with the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from outrider.randomness.philox_numpy import gumbel, uniform
from outrider.randomness.streams import Stream

VOCABULARY, LENGTH, NUM_DRAWS, START = 4, 3, 30_000, 9
LEAST_CONFIDENCE = 0.3
Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
CHANCE = np.random.default_rng(7)
TARGET: Doubles = CHANCE.dirichlet(np.full(VOCABULARY, 3.0), VOCABULARY)
DRAFT: Doubles = 0.7 * TARGET + 0.3 * CHANCE.dirichlet(np.ones(VOCABULARY), VOCABULARY)
"""Laws by the token before."""


def race(laws: Doubles, seeds: Ints, stream: Stream, bases: Ints, positions: Ints) -> Ints:  # [N, V], [N] each
    noise = gumbel(seeds[:, None], stream, bases[:, None], positions[:, None], np.arange(VOCABULARY))
    found: Ints = (np.log(laws) + noise).argmax(axis=1)
    return found


@dataclass
class Sessions:
    """Many sessions, all of them after as many steps."""

    policy: str
    seeds: Ints
    tokens: Ints  # [N, any] of the output
    lengths: Ints  # [N]
    is_hit: NDArray[np.bool_]
    """The last step's draft token was kept, and the guess was right."""
    is_dropped: NDArray[np.bool_]
    """Bonus tokens that one of two guesses was, where only the continuation after the other one is kept."""

    @classmethod
    def of(cls, policy: str) -> Sessions:
        seeds = np.arange(NUM_DRAWS)
        nothing = np.zeros(NUM_DRAWS, dtype=np.int64)
        tokens = np.zeros((NUM_DRAWS, 4 * LENGTH), dtype=np.int64)
        return cls(policy, seeds, tokens, nothing, nothing > 0, nothing > 0)

    def put(self, chosen: NDArray[np.bool_], token_ids: Ints) -> None:
        rows = np.flatnonzero(chosen)
        self.tokens[rows, self.lengths[rows]] = token_ids[rows]
        self.lengths = self.lengths + chosen

    def step(self) -> None:
        """One draft token of each session, and a second one after a confident first that is kept and judged."""
        bases, seeds = START + self.lengths, self.seeds
        before = np.where(self.lengths > 0, self.tokens[np.arange(NUM_DRAWS), self.lengths - 1], 0)
        first = race(DRAFT[before], seeds, Stream.PROPOSAL, bases, bases)
        confidence = DRAFT[before, first]
        is_plain = np.zeros(NUM_DRAWS, dtype=np.bool_)
        if self.policy == "throws away":
            is_plain = self.is_hit & (confidence < LEAST_CONFIDENCE)
        elif "branch" in self.policy:
            is_plain = self.is_dropped
        is_alive, draft, positions = ~is_plain, first, bases.copy()
        for place in range(2):
            is_drawn = is_alive if place == 0 else is_alive & (confidence > LEAST_CONFIDENCE)
            if place == 1:
                draft = race(DRAFT[before], seeds, Stream.PROPOSAL, bases, positions)
            coins = uniform(seeds, Stream.ACCEPTANCE, bases, positions)
            is_kept = is_drawn & (coins < TARGET[before, draft] / DRAFT[before, draft])
            residual = np.maximum(TARGET[before] - DRAFT[before], 0).cumsum(axis=1)
            points = uniform(seeds, Stream.RESIDUAL, bases, positions) * residual[:, -1]
            recovered = (residual <= points[:, None]).sum(axis=1)
            self.put(is_drawn, np.where(is_kept, draft, recovered))
            is_alive &= is_kept | ~is_drawn
            before, positions = np.where(is_kept, draft, before), positions + is_kept
        ends = is_alive | is_plain
        bonus = race(TARGET[before], seeds, Stream.OUTSIDE, bases, positions)
        guess = race(DRAFT[before], seeds, Stream.OUTSIDE, bases, positions)
        self.put(ends, bonus)
        self.is_hit = ends & ~is_plain & (guess == bonus)
        if "branch" not in self.policy:
            return
        noise = gumbel(seeds[:, None], Stream.OUTSIDE, bases[:, None], positions[:, None], np.arange(VOCABULARY))
        guesses = (np.log(DRAFT[before]) + noise).argsort(axis=1)[:, -2:]  # [N, 2]
        is_guessed = (guesses == bonus[:, None]).any(axis=1)
        self.is_dropped = ends & ~is_plain & is_guessed & (bonus != self.kept(guesses, before))

    def kept(self, guesses: Ints, before: Ints) -> Ints:  # [N, 2], [N] -> [N]
        """The one of two guesses whose continuation is kept."""
        bases = START + self.lengths
        firsts = [race(DRAFT[guess], self.seeds, Stream.PROPOSAL, bases, bases) for guess in guesses.T]
        confidence = np.stack([DRAFT[guess, first] for guess, first in zip(guesses.T, firsts, strict=True)], axis=1)
        if self.policy == "keeps the likely branch":
            confidence = DRAFT[before[:, None], guesses]
        found: Ints = guesses[np.arange(len(guesses)), confidence.argmax(axis=1)]
        return found


def p_value(observed: Ints, expected: Doubles, freedom: int) -> float:
    assert expected.min() > 5
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), freedom))


def joint_p_value(policy: str) -> float:
    """P-value of the first tokens of all sessions."""
    sessions = Sessions.of(policy)
    while sessions.lengths.min() < LENGTH:
        sessions.step()
    cells = sessions.tokens[:, :LENGTH] @ VOCABULARY ** np.arange(LENGTH)[::-1]
    law = TARGET[0]
    for _ in range(LENGTH - 1):
        law = (law.reshape(-1, VOCABULARY)[..., None] * TARGET).reshape(-1)
    size = VOCABULARY**LENGTH
    return p_value(np.bincount(cells, minlength=size), law * NUM_DRAWS, size - 1)


def claimed_p_value(policy: str) -> float:
    """P-value of the token after a bonus that was guessed, given that it was."""
    sessions = Sessions.of(policy)
    sessions.step()
    is_hit, at = sessions.is_hit | sessions.is_dropped, sessions.lengths.copy()
    assert 0.2 < is_hit.mean() < 0.9
    sessions.step()
    rows = np.flatnonzero(is_hit)
    pairs = sessions.tokens[rows, at[rows] - 1] * VOCABULARY + sessions.tokens[rows, at[rows]]
    observed = np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
    expected = observed.sum(axis=1, keepdims=True) * TARGET
    return p_value(observed, expected, VOCABULARY * (VOCABULARY - 1))


def test_claimed_continuations_follow_the_targets_law() -> None:
    assert joint_p_value("claims") > 1e-3
    assert claimed_p_value("claims") > 1e-3


def test_a_continuation_thrown_away_for_its_own_confidence_is_seen() -> None:
    assert joint_p_value("throws away") < 1e-12
    assert claimed_p_value("throws away") < 1e-12


def test_branches_that_are_kept_for_their_guesses_follow_the_targets_law() -> None:
    assert joint_p_value("keeps the likely branch") > 1e-3
    assert claimed_p_value("keeps the likely branch") > 1e-3


def test_branches_that_are_kept_for_their_own_confidence_are_seen() -> None:
    assert joint_p_value("keeps the confident branch") < 1e-12
    assert claimed_p_value("keeps the confident branch") < 1e-12
