"""Prepared tokens: sessions that wait for the token of a plain step, after which the target is asked for the next.

Shape letters: ``B`` sessions, ``C`` columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from outrider.batched import U4, U8, AnswerBatch, Column, ScoreBatch
from outrider_coordinator.acceptance.vectorized import TARGET_SUM_TOLERANCE
from outrider_coordinator.session import state_feed
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.prepared import EVERY, NO_IDS, UNUSUAL, Bools, PreparedScores, Taken, Which, chosen
from outrider_coordinator.session.state import SCORING
from outrider_coordinator.session.table import Ints, SessionTable
from outrider_coordinator.speculation import DraftLengthPolicy

_NO_DRAFT = 2 << col.DRAFT_READINESS | col.IS_LATE


def waits_for_token(rows: Ints) -> Bools:  # [B, C] -> [B]
    """Rows that wait for the token of a plain step which is not their last, and are usual; none is a prefill."""
    found: Bools = rows[:, col.FLAGS] & UNUSUAL == 0
    found &= rows[:, col.STATUS] == SCORING
    found &= rows[:, col.NUM_DRAFTED] == 0
    found &= rows[:, col.LENGTH] - rows[:, col.TARGET_HELD] == 1
    found &= rows[:, col.TARGET_HELD] > 0
    found &= rows[:, col.REMAINING] > 1
    return found


class PreparedTokens(PreparedScores):
    """Sessions without a proposal, which go on without one."""

    def __init__(self, table: SessionTable, index: Ints, rows: Ints) -> None:
        super().__init__(table, index, rows)
        self._hash_tails = np.array(self._hashes, dtype=U8)
        self._reads_any = any(flag & col.READS_STATES for flag in self.flags)

    @classmethod
    def fit(cls, rows: Ints, answers: AnswerBatch[Any]) -> Bools:  # [B, C] -> [B]
        """Rows that wait for one token."""
        return super().fit(rows, answers) & waits_for_token(rows)

    def is_of(self, answers: AnswerBatch[Any]) -> bool:
        """True if these are the tokens of all of these sessions, whose rows have not changed since."""
        has_all = answers.token_ids.size == len(self.sessions)
        return super().is_of(answers) and has_all and self.is_sparse == (answers.outside_masses is not None)

    def take(self, answers: AnswerBatch[Any], policy: DraftLengthPolicy, *, channel: int = 0) -> Taken | None:
        """Commit the tokens, and ask for the next ones; None if none can be taken here."""
        masses, tokens = answers.outside_masses, answers.token_ids
        goes_on: Bools = answers.unsigned_ids < self.limits
        if masses is not None:
            goes_on &= np.abs(masses.astype(np.float64) - 1.0) <= TARGET_SUM_TOLERANCE
        if not all(are_plain := policy.are_plain(self.speculations)):
            goes_on &= np.array(are_plain) | ~self._may_draft()
        listed = tokens.tolist()
        if self.table.may_end(listed):
            goes_on &= self._do_not_end([[token_id] for token_id in listed])
        if self.has_grammars:
            goes_on &= self._leave_choice([[token_id] for token_id in listed], is_drafting=False)
        if self._reads_any:
            goes_on &= ~np.array([state_feed.is_to_follow(session) for session in self.sessions])
        which: Which = EVERY
        if not goes_on.all():
            which = np.flatnonzero(goes_on)
            if not which.size:
                return None
        return self._asked_next(which, tokens[which])

    def _may_draft(self) -> Bools:
        """Mask of the drafts that may be asked, and have room."""
        rows = self.rows
        has_capacity = (rows[:, col.REMAINING] > 2) & (rows[:, col.CAPACITY] > rows[:, col.LENGTH] + 1)
        found: Bools = (rows[:, col.FLAGS] & _NO_DRAFT == 0) & has_capacity
        return found

    def _asked_next(self, which: Which, tokens: Column) -> Taken:
        kept = self.bases[which]
        nothing = np.zeros(len(kept), dtype=U4)
        commands = ScoreBatch(
            self.numbers[which],
            self._next_generations[which],
            kept,
            b"".join(chosen(self._chains, which)),
            self._hash_tails[which],
            np.ones(len(kept), dtype=U4),
            tokens,
            nothing,
            NO_IDS,
            trace_parents=self._parents_of(which),
        )
        commit = partial(self._commit, which, tokens)
        return Taken(self._listed(which), commands, commit, (self._counts[which], nothing))

    def _commit(self, which: Which, tokens: Column) -> list[list[int]]:
        after = self._ended(which, 1, tokens)
        after[:, col.FLAGS] &= ~col.CLAIMS
        after[:, col.TARGET_ASKED] = after[:, col.GENERATION]
        after[:, col.CREDIT] = np.maximum(after[:, col.CREDIT] - 1, 0)
        after[:, col.NUM_PLAIN] += 1
        return self._write(which, after, [[token_id] for token_id in tokens.tolist()])
