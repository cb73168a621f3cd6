"""Rows that many sessions' transitions may take: each condition keeps a row out by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from outrider_coordinator.session import table
from outrider_coordinator.session.prepared import Bools
from outrider_coordinator.session.prepared_proposals import waits_for_proposal
from outrider_coordinator.session.prepared_tokens import waits_for_token
from outrider_coordinator.session.prepared_verdicts import waits_for_verdict
from outrider_coordinator.session.state import DRAFTING, SCORING
from outrider_coordinator.session.table import Ints

Row = dict[int, int]
LONG: Row = {table.LENGTH: 10, table.TARGET_HELD: 9, table.REMAINING: 5}
PROPOSAL: Row = {**LONG, table.STATUS: DRAFTING, table.DRAFT_LENGTH: 4, table.DRAFT_BASE: 10}
TOKEN: Row = {**LONG, table.STATUS: SCORING}
VERDICT: Row = {**TOKEN, table.NUM_DRAFTED: 3, table.DRAFT_HELD: 10, table.PROPOSAL_OPENED: 2, table.DRAFT_OPENED: 2}

NOT_SCORED: tuple[Row, ...] = (
    {table.STATUS: DRAFTING},
    {table.TARGET_HELD: 8},
    {table.FLAGS: table.PAUSED},
    {table.FLAGS: table.HAS_PART},
    {table.FLAGS: table.IS_SLOW},
)
CASES: tuple[tuple[Callable[[Ints], Bools], Row, tuple[Row, ...]], ...] = (
    (
        waits_for_proposal,
        PROPOSAL,
        (
            {table.STATUS: SCORING},
            {table.DRAFT_LENGTH: 0},
            {table.DRAFT_BASE: 9},
            {table.TARGET_HELD: 8},
            {table.FLAGS: table.IS_DENSE},
            {table.FLAGS: 1 << table.TARGET_READINESS},
            {table.FLAGS: 2 << table.TARGET_READINESS},
        ),
    ),
    (
        waits_for_verdict,
        VERDICT,
        (
            *NOT_SCORED,
            {table.NUM_DRAFTED: 0},
            {table.DRAFT_HELD: 9},
            {table.DRAFT_ASKED: 7},
            {table.PROPOSAL_OPENED: 1},
            {table.FLAGS: table.IS_LATE},
            {table.FLAGS: 1 << table.DRAFT_READINESS},
            {table.FLAGS: 2 << table.DRAFT_READINESS},
        ),
    ),
    (
        waits_for_token,
        TOKEN,
        (*NOT_SCORED, {table.NUM_DRAFTED: 1}, {table.LENGTH: 1, table.TARGET_HELD: 0}, {table.REMAINING: 1}),
    ),
)


@pytest.mark.parametrize(("condition", "usual", "changes"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_each_condition_keeps_a_row_out(
    condition: Callable[[Ints], Bools], usual: Row, changes: tuple[Row, ...]
) -> None:
    rows = np.zeros((1 + len(changes), table.NUM_COLUMNS), dtype=np.int64)
    for row, change in zip(rows, ({}, *changes), strict=True):
        for column, number in {**usual, **change}.items():
            row[column] = number
    assert condition(rows).tolist() == [True, *[False] * len(changes)]
