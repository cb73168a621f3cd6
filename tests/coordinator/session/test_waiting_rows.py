"""Rows that many sessions' transitions may take: each condition keeps a row out by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.prepared import Bools
from outrider_coordinator.session.prepared_proposals import waits_for_proposal
from outrider_coordinator.session.prepared_tokens import waits_for_token
from outrider_coordinator.session.prepared_verdicts import waits_for_verdict
from outrider_coordinator.session.state import DRAFTING, SCORING
from outrider_coordinator.session.table import Ints

Row = dict[int, int]
LONG: Row = {col.LENGTH: 10, col.TARGET_HELD: 9, col.REMAINING: 5}
PROPOSAL: Row = {**LONG, col.STATUS: DRAFTING, col.DRAFT_LENGTH: 4, col.DRAFT_BASE: 10}
TOKEN: Row = {**LONG, col.STATUS: SCORING}
VERDICT: Row = {**TOKEN, col.NUM_DRAFTED: 3, col.DRAFT_HELD: 10, col.PROPOSAL_OPENED: 2, col.DRAFT_OPENED: 2}

NOT_SCORED: tuple[Row, ...] = (
    {col.STATUS: DRAFTING},
    {col.TARGET_HELD: 8},
    {col.FLAGS: col.PAUSED},
    {col.FLAGS: col.HAS_PART},
    {col.FLAGS: col.IS_SLOW},
)
CASES: tuple[tuple[Callable[[Ints], Bools], Row, tuple[Row, ...]], ...] = (
    (
        waits_for_proposal,
        PROPOSAL,
        (
            {col.STATUS: SCORING},
            {col.DRAFT_LENGTH: 0},
            {col.DRAFT_BASE: 9},
            {col.TARGET_HELD: 8},
            {col.FLAGS: 1 << col.TARGET_READINESS},
            {col.FLAGS: 2 << col.TARGET_READINESS},
        ),
    ),
    (
        waits_for_verdict,
        VERDICT,
        (
            *NOT_SCORED,
            {col.NUM_DRAFTED: 0},
            {col.DRAFT_HELD: 9},
            {col.DRAFT_ASKED: 7},
            {col.PROPOSAL_OPENED: 1},
            {col.FLAGS: col.IS_LATE},
            {col.FLAGS: 1 << col.DRAFT_READINESS},
            {col.FLAGS: 2 << col.DRAFT_READINESS},
        ),
    ),
    (
        waits_for_token,
        TOKEN,
        (*NOT_SCORED, {col.NUM_DRAFTED: 1}, {col.LENGTH: 1, col.TARGET_HELD: 0}, {col.REMAINING: 1}),
    ),
)


@pytest.mark.parametrize(("condition", "usual", "changes"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_each_condition_keeps_a_row_out(
    condition: Callable[[Ints], Bools], usual: Row, changes: tuple[Row, ...]
) -> None:
    rows = np.zeros((1 + len(changes), col.NUM_COLUMNS), dtype=np.int64)
    for row, change in zip(rows, ({}, *changes), strict=True):
        for column, number in {**usual, **change}.items():
            row[column] = number
    assert condition(rows).tolist() == [True, *[False] * len(changes)]
