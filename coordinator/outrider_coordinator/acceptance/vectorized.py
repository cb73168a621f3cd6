"""Supports of the proposals of a message as arrays, and the checks of ``evidence`` on all of them.

Says nothing of what is wrong: where a proposal is not in order, each is checked by itself. Verdicts are made in
``joint_verdicts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import AnswerColumns, ragged
from outrider.types import FloatArray, IntArray
from outrider_coordinator.acceptance.evidence import ROW_SUM_TOLERANCE

Indices = NDArray[np.int64]
Doubles = NDArray[np.float64]


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

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """The cases of all parts, one part after the other."""
        num_rows, counts = (np.concatenate([getattr(part, name) for part in parts]) for name in ("num_rows", "counts"))
        return cls(
            num_rows=num_rows,
            counts=counts,
            starts=counts.cumsum() - counts,
            cases=np.arange(num_rows.size).repeat(num_rows),
            drafted=np.concatenate([part.drafted for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
            probs=np.concatenate([part.probs for part in parts]),
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


def are_sound_columns(proposals: AnswerColumns[Any], limits: Indices) -> bool:  # limits [C]
    """True if ``check_proposal`` would accept the evidence of all proposals, which came as columns."""
    supports = proposals.supports
    if supports is None or not supports.counts.size or int(supports.counts.min()) < 1:
        return False
    return _are_sound_rows(Rows.of_columns(proposals), limits)


def _are_sound_rows(rows: Rows, limits: Indices) -> bool:  # limits [C]
    ids, probs = rows.ids, rows.probs
    return bool(
        ids.item(ids.argmin()) >= 0
        and (np.maximum.reduceat(ids, rows.starts) < limits[rows.cases]).all()
        and probs.item(probs.argmin()) > 0
        and are_near_1(rows.sums(probs), ROW_SUM_TOLERANCE)
        and _are_distinct(rows)
        and len(rows.where_drafted()) == len(rows.drafted)
    )


def _are_distinct(rows: Rows) -> bool:
    """True if no id is twice in one support; ids are not negative."""
    width = rows.counts.item(0)
    if (rows.counts == width).all():  # mostly: short rows of equal length are sorted in a fraction of the time
        keys = np.sort(rows.ids.reshape(-1, width), axis=1)
        return bool((keys[:, 1:] != keys[:, :-1]).all())
    keys = np.arange(len(rows.counts)).repeat(rows.counts) * (rows.ids.item(rows.ids.argmax()) + 1) + rows.ids
    keys.sort()
    return bool((keys[1:] != keys[:-1]).all())


def are_near_1(sums: Doubles, tolerance: float) -> bool:
    """True if no sum differs from 1 by more; False for NaN."""
    return bool((np.abs(sums - 1.0) <= tolerance).all())
