"""Supports of proposals as arrays, of one or of all of a message, and the checks of what a draft says of them.

Verdicts are made in ``joint_verdicts``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import AnswerBatch, ragged
from outrider.types import FloatArray, IntArray, SparseEvidence
from outrider.values import step_value

ROW_SUM_TOLERANCE = 1e-4
"""A row of probabilities summed in float64; float32 rows of a thousand ids are off by some 1e-6."""
TARGET_SUM_TOLERANCE = 1e-2
"""Support and outside mass together; wide, since a target sums 128k float32 probabilities."""

Indices = NDArray[np.int64]
Doubles = NDArray[np.float64]


@step_value(frozen=True, slots=False)
class SupportRows:
    """The supports of all draft positions of all cases, concatenated."""

    num_rows: Indices  # [C] draft tokens of each case
    counts: Indices  # [R] ids in each row
    starts: Indices  # [R]
    drafted: Indices  # [R]; what a service says may be any number
    ids: IntArray  # [N]
    probs: FloatArray  # [N]

    @classmethod
    def of(cls, num_rows: Indices, counts: Indices, drafted: Indices, ids: IntArray, probs: FloatArray) -> SupportRows:
        """Rows with the fields that follow from the counts."""
        return cls(num_rows, counts, counts.cumsum() - counts, drafted, ids, probs)

    @classmethod
    def of_batch(cls, proposals: AnswerBatch[Any]) -> SupportRows:
        """Rows of proposals that came as arrays, with supports."""
        supports = proposals.supports
        if supports is None:
            raise ValueError("these proposals have no supports")
        num_rows, counts = proposals.counts.astype(np.int64), supports.counts.astype(np.int64)
        return cls.of(num_rows, counts, proposals.token_ids.astype(np.int64), supports.token_ids, supports.probs)

    @classmethod
    def of_one(cls, draft_token_ids: Sequence[int], evidence: SparseEvidence) -> SupportRows:
        """Rows of a single proposal."""
        num_rows, drafted = np.array([len(draft_token_ids)]), np.array(draft_token_ids, dtype=np.int64)
        return cls.of(num_rows, evidence.counts.astype(np.int64), drafted, evidence.token_ids, evidence.probs)

    @classmethod
    def joined(cls, parts: Sequence[SupportRows]) -> SupportRows:
        """The cases of all parts, one part after the other."""
        names = ("num_rows", "counts", "drafted", "ids", "probs")
        return cls.of(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def selected(self, cases: Indices) -> SupportRows:
        """Rows of these cases alone."""
        rows = ragged(self.num_rows, cases)
        ids = ragged(self.counts, rows)
        return SupportRows.of(
            self.num_rows[cases], self.counts[rows], self.drafted[rows], self.ids[ids], self.probs[ids]
        )

    @functools.cached_property
    def cases(self) -> Indices:  # [R]
        """Case of each row."""
        return np.arange(self.num_rows.size).repeat(self.num_rows)

    @functools.cached_property
    def firsts(self) -> Indices:  # [C]
        """Row of each case's first draft token."""
        return self.num_rows.cumsum() - self.num_rows

    @functools.cached_property
    def steps(self) -> Indices:  # [R]
        """Position of each row's draft token in its case."""
        found: Indices = np.arange(self.counts.size) - self.firsts[self.cases]
        return found

    @functools.cached_property
    def where_drafted(self) -> Indices:
        """Indices of the draft tokens in their supports, if they are there."""
        found: Indices = (self.ids == self.drafted.repeat(self.counts)).nonzero()[0]
        return found

    def sums(self, values: FloatArray) -> Doubles:  # [N] -> [R]
        """Sums of the values of each support."""
        return np.add.reduceat(values, self.starts, dtype=np.float64)


def are_sound(rows: SupportRows, limits: Indices) -> bool:  # limits [C]
    """True if each draft token was drawn from its support: distinct ids below the limit, with probabilities above 0
    that sum to 1.
    """
    if not rows.counts.size or rows.counts.item(rows.counts.argmin()) < 1:
        return False
    ids, probs = rows.ids, rows.probs
    return bool(
        ids.item(ids.argmin()) >= 0
        and (
            ids.item(ids.argmax()) < limits.item(limits.argmin())
            or (np.maximum.reduceat(ids, rows.starts) < limits[rows.cases]).all()
        )
        and probs.item(probs.argmin()) > 0
        and are_near_1(rows.sums(probs), ROW_SUM_TOLERANCE)
        and _are_distinct(rows)
        and len(rows.where_drafted) == len(rows.drafted)
    )


def _are_distinct(rows: SupportRows) -> bool:
    """True if no id is twice in one support; ids are not negative."""
    width = rows.counts.item(rows.counts.argmax())
    if width * rows.counts.size == rows.ids.size:  # mostly: short rows of equal length are sorted in a fraction
        by_row = rows.ids.reshape(-1, width).copy()
        by_row.sort(axis=1)
        return 0 not in (by_row[:, 1:] != by_row[:, :-1]).tobytes()
    keys = np.arange(len(rows.counts)).repeat(rows.counts) * (rows.ids.item(rows.ids.argmax()) + 1) + rows.ids
    keys.sort()
    return 0 not in (keys[1:] != keys[:-1]).tobytes()


def are_near_1(sums: Doubles, tolerance: float) -> bool:
    """True if no sum differs from 1 by more; False for NaN."""
    return bool(1.0 - sums.item(sums.argmin()) <= tolerance and sums.item(sums.argmax()) - 1.0 <= tolerance)
