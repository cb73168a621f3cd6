"""Sparse rejection for many sessions at once: the checks and verdicts of ``evidence`` and ``rejection``, bit by bit.

One session's step is a few dozen array operations on a few hundred numbers, and nearly all of their time goes into the
calls; for thirty sessions it is the same calls once. Owns no rule and says nothing of what is wrong: wherever a
proposal or its scores are not in order, or a draw is a border case, the answer is that each has to be judged alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import AnswerColumns, ragged
from outrider.randomness.philox_numpy import uniform
from outrider.randomness.streams import Stream
from outrider.types import FloatArray, IntArray, SparseEvidence, SparseScores
from outrider.values import step_value
from outrider_coordinator.acceptance.evidence import ROW_SUM_TOLERANCE, TARGET_SUM_TOLERANCE
from outrider_coordinator.acceptance.verdict import NextToken, Verdict

Indices = NDArray[np.int64]
Doubles = NDArray[np.float64]

FEWEST = 8
"""With fewer sessions than this it is hardly faster, or slower."""


@step_value(frozen=True, slots=True)
class ProposalCase:
    """A proposal that has arrived."""

    draft_token_ids: tuple[int, ...]
    """At least one, and no more than were asked for."""
    evidence: SparseEvidence
    num_token_ids: int


@step_value(frozen=True, slots=True)
class ScoredCase:
    """A proposal that passed ``check_proposal``, and its scores."""

    proposal: ProposalCase
    scores: SparseScores
    seed: int
    base: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The supports of all draft positions of all cases, concatenated."""

    num_rows: Indices  # [C] draft tokens of each case
    counts: Indices  # [R] ids in each row
    starts: Indices  # [R]
    cases: Indices  # [R] which case a row is of
    drafted: Indices  # [R]; what a service says may be any number
    ids: IntArray  # [N]
    probs: FloatArray  # [N]

    @classmethod
    def of(cls, cases: Sequence[ProposalCase]) -> Rows:
        """Of proposals one by one, whose supports have fitting shapes."""
        num_rows = np.array([len(case.draft_token_ids) for case in cases], dtype=np.int64)
        counts = np.concatenate([case.evidence.counts for case in cases]).astype(np.int64)
        return cls(
            num_rows=num_rows,
            counts=counts,
            starts=counts.cumsum() - counts,
            cases=np.arange(len(cases)).repeat(num_rows),
            drafted=np.array([token_id for case in cases for token_id in case.draft_token_ids], dtype=np.int64),
            ids=np.concatenate([case.evidence.token_ids for case in cases]),
            probs=np.concatenate([case.evidence.probs for case in cases]),
        )

    @classmethod
    def of_columns(cls, proposals: AnswerColumns[Any]) -> Rows:
        """Of proposals that came as columns, with supports."""
        supports = proposals.supports
        if supports is None:
            raise ValueError("these proposals have no supports")
        num_rows, counts = proposals.counts.astype(np.int64), supports.counts.astype(np.int64)
        return cls(
            num_rows=num_rows,
            counts=counts,
            starts=counts.cumsum() - counts,
            cases=np.arange(num_rows.size).repeat(num_rows),
            drafted=proposals.token_ids.astype(np.int64),
            ids=supports.token_ids,
            probs=supports.probs,
        )

    def selected(self, cases: Indices) -> Rows:
        """Of these cases alone."""
        rows = ragged(self.num_rows, cases)
        ids = ragged(self.counts, rows)
        num_rows, counts = self.num_rows[cases], self.counts[rows]
        return Rows(
            num_rows=num_rows,
            counts=counts,
            starts=counts.cumsum() - counts,
            cases=np.arange(num_rows.size).repeat(num_rows),
            drafted=self.drafted[rows],
            ids=self.ids[ids],
            probs=self.probs[ids],
        )

    def where_drafted(self) -> Indices:
        """Indices of the draft tokens in their supports, if they are there."""
        return np.flatnonzero(self.ids == self.drafted.repeat(self.counts))

    def sums(self, values: FloatArray) -> Doubles:  # [N] -> [R]
        """Of the values of each support."""
        return np.add.reduceat(values, self.starts, dtype=np.float64)


def are_sound(cases: Sequence[ProposalCase]) -> bool:
    """Whether ``check_proposal`` would accept all of them; False also if the test is not worthwhile."""
    if len(cases) < FEWEST or not all(map(has_fitting_shapes, cases)):
        return False
    return _are_sound_rows(Rows.of(cases), np.array([case.num_token_ids for case in cases], dtype=np.int64))


def are_sound_columns(proposals: AnswerColumns[Any], limits: Indices) -> bool:  # limits [C]
    """Whether ``check_proposal`` would accept the evidence of all proposals, which came as columns."""
    supports = proposals.supports
    if supports is None or not supports.counts.size or int(supports.counts.min()) < 1:
        return False
    return _are_sound_rows(Rows.of_columns(proposals), limits)


def _are_sound_rows(rows: Rows, limits: Indices) -> bool:  # limits [C]
    limits = limits[rows.cases]  # [R]
    keys = np.arange(len(rows.counts)).repeat(rows.counts) * int(limits.max()) + rows.ids
    keys.sort()
    return bool(
        int(rows.ids.min()) >= 0
        and (np.maximum.reduceat(rows.ids, rows.starts) < limits).all()
        and float(rows.probs.min()) > 0
        and _are_near_1(rows.sums(rows.probs), ROW_SUM_TOLERANCE)
        and (keys[1:] != keys[:-1]).all()
        and len(rows.where_drafted()) == len(rows.drafted)
    )


def has_fitting_shapes(case: ProposalCase) -> bool:
    """Whether every draft token has a support, and every id a probability."""
    evidence = case.evidence
    counts = evidence.counts
    return (
        counts.shape == (len(case.draft_token_ids),)
        and int(counts.min()) > 0
        and evidence.token_ids.shape == evidence.probs.shape == (int(counts.sum()),)
    )


def judge_together(cases: Sequence[ScoredCase]) -> list[Verdict] | None:
    """The verdict of ``judge`` on each case; None for a case that has to be judged alone."""
    if len(cases) < FEWEST or not all(map(_has_fitting_scores, cases)):
        return None
    rows = Rows.of([case.proposal for case in cases])
    score_rows = _ScoreRows.of(cases, rows)
    judged = _judge_rows(
        rows,
        score_rows,
        limits=np.array([case.proposal.num_token_ids for case in cases], dtype=np.int64),
        seeds=np.array([case.seed for case in cases], dtype=np.uint64),
        bases=np.array([case.base for case in cases], dtype=np.int64),
    )
    if judged is None:
        return None
    heads = zip(judged[0].tolist(), judged[1].tolist(), rows.num_rows.tolist(), strict=True)
    return [
        Verdict(num_accepted, token_id, NextToken.BONUS if num_accepted == num_drafted else NextToken.RECOVERED)
        for num_accepted, token_id, num_drafted in heads
    ]


def judge_columns(
    rows: Rows, scores: AnswerColumns[Any], *, limits: Indices, seeds: NDArray[np.uint64], bases: Indices
) -> tuple[Indices, Indices] | None:
    """``judge_together`` of scores that came as columns, on checked proposals: accepted tokens and the token after them
    [C]; None if any has to be judged alone.
    """
    if scores.outside_masses is None or not np.array_equal(scores.counts, rows.num_rows + 1):
        return None
    sizes = np.add.reduceat(rows.counts, rows.num_rows.cumsum() - rows.num_rows)
    if scores.supports is None or not np.array_equal(scores.supports.counts, sizes):
        return None
    score_rows = _ScoreRows.at(scores.supports.probs, scores.outside_masses, scores.token_ids, rows)
    return _judge_rows(rows, score_rows, limits=limits, seeds=seeds, bases=bases)


@dataclass(frozen=True, slots=True)
class _ScoreRows:
    """The targets' scores of the rows, and of the position after each proposal."""

    inside: FloatArray  # [N]
    outside: FloatArray  # [R+C]
    drawn: IntArray  # [R+C]
    judged: Indices  # [R] of those, the draft tokens' own
    lasts: Indices  # [C] of those, the ones after each proposal

    @classmethod
    def of(cls, cases: Sequence[ScoredCase], rows: Rows) -> _ScoreRows:
        return cls.at(
            np.concatenate([case.scores.support_probs for case in cases]),
            np.concatenate([case.scores.outside_mass for case in cases]),
            np.concatenate([case.scores.outside_token_ids for case in cases]),
            rows,
        )

    @classmethod
    def at(cls, inside: FloatArray, outside: FloatArray, drawn: IntArray, rows: Rows) -> _ScoreRows:
        judged = np.arange(len(rows.counts)) + rows.cases
        return cls(inside, outside, drawn, judged, (rows.num_rows + 1).cumsum() - 1)


def _has_fitting_scores(case: ScoredCase) -> bool:
    scores, num_positions = case.scores, len(case.proposal.draft_token_ids) + 1
    return (
        scores.support_probs.shape == case.proposal.evidence.token_ids.shape
        and scores.outside_mass.shape == scores.outside_token_ids.shape == (num_positions,)
    )


def _are_sound_scores(rows: Rows, score_rows: _ScoreRows, limits: Indices) -> bool:  # limits [R+C]
    sums = score_rows.outside.astype(np.float64)
    sums[score_rows.judged] += rows.sums(score_rows.inside)
    is_needed = score_rows.outside > 0
    is_needed[score_rows.lasts] = True
    return bool(
        float(score_rows.inside.min()) >= 0
        and float(score_rows.outside.min()) >= 0
        and _are_near_1(sums, TARGET_SUM_TOLERANCE)
        and (~is_needed | ((score_rows.drawn >= 0) & (score_rows.drawn < limits))).all()
    )


def _judge_rows(
    rows: Rows, score_rows: _ScoreRows, *, limits: Indices, seeds: NDArray[np.uint64], bases: Indices
) -> tuple[Indices, Indices] | None:
    """By case [C] the number of accepted tokens, and the token after them; None where each has to be judged alone."""
    if not _are_sound_scores(rows, score_rows, limits.repeat(rows.num_rows + 1)):
        return None
    seeds, bases = seeds[rows.cases], bases[rows.cases]  # [R]
    firsts = rows.num_rows.cumsum() - rows.num_rows  # [C]
    steps = np.arange(len(rows.cases)) - firsts[rows.cases]  # [R] which draft token of its case
    drafted = rows.where_drafted()
    ratios = score_rows.inside[drafted].astype(np.float64) / rows.probs[drafted]
    rejected = np.flatnonzero(uniform(seeds, Stream.ACCEPTANCE, bases, bases + steps) >= ratios)
    ending, first = np.unique(rows.cases[rejected], return_index=True)  # cases with a rejection, and which is first
    stops = rejected[first]
    coins = uniform(seeds[stops], Stream.RESIDUAL, bases[stops], (bases + steps)[stops])
    recovered = _draw_recovered(rows, score_rows, stops, coins) if len(stops) else []
    if recovered is None:
        return None
    num_accepted, following = rows.num_rows.copy(), score_rows.drawn[score_rows.lasts].astype(np.int64)
    num_accepted[ending], following[ending] = steps[stops], recovered
    return num_accepted, following


def _draw_recovered(rows: Rows, score_rows: _ScoreRows, stops: Indices, coins: Doubles) -> list[int] | None:
    """A token from (target - draft)+ at each row of ``stops``; None when one of them is empty or ends past its sum."""
    counts, starts = rows.counts[stops], rows.starts[stops]
    columns = np.arange(int(counts.max()))
    places = np.minimum(starts[:, None] + columns, len(rows.ids) - 1)  # [J, S]
    left = np.maximum(score_rows.inside[places].astype(np.float64) - rows.probs[places], 0.0)
    # Behind its support each row has the mass outside, then nothing.
    weights = np.zeros((len(stops), len(columns) + 1))
    weights[:, :-1] = np.where(columns < counts[:, None], left, 0.0)
    weights[np.arange(len(stops)), counts] = score_rows.outside[score_rows.judged[stops]]
    sums = weights.cumsum(axis=1)
    chosen = (sums <= (coins * sums[:, -1])[:, None]).sum(axis=1)  # as searchsorted on the right
    if (chosen > counts).any():
        return None
    inside = rows.ids[np.minimum(starts + chosen, len(rows.ids) - 1)]
    found: list[int] = np.where(chosen < counts, inside, score_rows.drawn[score_rows.judged[stops]]).tolist()
    return found


def _are_near_1(sums: Doubles, tolerance: float) -> bool:
    return bool((np.abs(sums - 1.0) <= tolerance).all())  # false for NaN
