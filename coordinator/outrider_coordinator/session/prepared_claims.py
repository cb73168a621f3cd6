"""Prepared claims: sessions whose target has begun the next step by itself, which is asked for without draft tokens.

The draft tokens of a claimed step are those that had been pushed to the target, and come with its scores.

Shape letters: ``B`` sessions, ``W`` positions of the longest proposal and of the token after it, ``C`` columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from outrider.batched import U4, U8, AnswerBatch, Column, ScoreBatch
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.prepared import DRAFT_NOT_OPEN, NO_IDS, UNUSUAL, Bools, PreparedScores, Taken
from outrider_coordinator.session.state import SCORING
from outrider_coordinator.session.steps import MAX_SILENT_STEPS, UNCLAIMED
from outrider_coordinator.session.table import NO_TOKEN, Ints
from outrider_coordinator.speculation import DraftLengthPolicy


def waits_for_claimed(rows: Ints, num_drafts: Column) -> Bools:  # [B, C], [B] -> [B]
    """Rows that wait for the scores of that many draft tokens, are usual, and go on if their target does."""
    found: Bools = rows[:, col.FLAGS] & (UNUSUAL | UNCLAIMED | DRAFT_NOT_OPEN) == 0
    found &= rows[:, col.STATUS] == SCORING
    found &= rows[:, col.LENGTH] - rows[:, col.TARGET_HELD] == 1
    found &= rows[:, col.TARGET_HELD] > 0
    found &= rows[:, col.DRAFT_ASKED] == 0
    found &= rows[:, col.NUM_PLAIN] < MAX_SILENT_STEPS
    found &= rows[:, col.REMAINING] > num_drafts + 2
    is_claimed = (rows[:, col.FLAGS] & col.CLAIMS != 0) & (rows[:, col.NUM_DRAFTED] == 0)
    is_proposed = (rows[:, col.NUM_DRAFTED] == num_drafts) & (rows[:, col.PROPOSAL_OPENED] == rows[:, col.DRAFT_OPENED])
    found &= is_claimed | (is_proposed & (num_drafts > 0))
    return found


class PreparedClaims(PreparedScores):
    """Sessions that claim the steps their target has begun."""

    @classmethod
    def fit(cls, rows: Ints, answers: AnswerBatch[Any]) -> Bools:  # [B, C] -> [B]
        """Rows that go on if their target does. Their draft tokens come with the scores."""
        if answers.goes_on is None:
            return np.zeros(len(rows), dtype=np.bool_)
        found: Bools = waits_for_claimed(rows, answers.counts.astype(np.int64) - 1) & (answers.goes_on != 0)
        return found

    def take(self, answers: AnswerBatch[Any], policy: DraftLengthPolicy, *, channel: int = 0) -> Taken | None:
        """Judge the scores, commit what is kept, and claim the next steps; None if none can be claimed."""
        counts = answers.counts.astype(np.int64) - 1
        ids = answers.unsigned_ids
        width = int(counts.max()) + 1
        at = np.arange(width)
        drafts = np.full((len(counts), width), NO_TOKEN, dtype=U4)  # [B, W]
        if answers.draft_token_ids is not None:
            drafts[at < counts[:, None]] = answers.draft_token_ids
        firsts = (counts + 1).cumsum() - counts - 1
        scored = ids.take(firsts[:, None] + np.minimum(at, counts[:, None]))  # [B, W], the last repeated
        accepted = (scored == drafts).argmin(axis=1)  # there is no draft token at the end
        next_ids = ids.take(accepted + firsts)
        wanted = np.array(policy.lengths(self.speculations))
        goes_on = (scored.max(axis=1) < self.limits) & (wanted > 0) & ((counts == 0) | (counts == wanted))
        goes_on &= self._has_scored_own(counts, drafts)
        new_ids = [[*row[:count], token_id] for row, count, token_id in
                   zip(drafts.tolist(), accepted.tolist(), next_ids.tolist(), strict=True)]  # fmt: skip
        if self.table.may_end(token_id for row in new_ids for token_id in row):
            goes_on &= self._do_not_end(new_ids)
        which = np.flatnonzero(goes_on)
        if not which.size:
            return None
        chosen = [new_ids[place] for place in which.tolist()]
        return self._claimed(which, counts[which], accepted[which], next_ids[which], chosen)

    def _has_scored_own(self, counts: Column, drafts: Column) -> Bools:
        """False where a proposal that came here is not what was scored."""
        width = drafts.shape[1]
        own = self.table.drafted[self.index, :width]
        is_own: Bools = ((own == drafts) | (np.arange(width) >= counts[:, None])).all(axis=1)
        is_own |= self._counts == 0
        return is_own

    def _claimed(self, which: Ints, counts: Ints, accepted: Ints, next_ids: Column, new_ids: list[list[int]]) -> Taken:
        self._commit(which, counts, accepted, next_ids, new_ids)
        kept = self._base[which] + accepted
        tails, chains = self.hashes(kept.tolist(), which)
        commands = ScoreBatch(
            self.numbers[which],
            self._next_generations[which],
            kept.astype(U4),
            b"".join(chains),
            np.array(tails, dtype=U8),
            np.ones(len(which), dtype=U4),
            next_ids,
            np.zeros(len(which), dtype=U4),
            NO_IDS,
            trace_parents=self._parents_of(which),
        )
        return Taken(which.tolist(), commands, partial(list, new_ids), (counts, accepted.astype(U4)))

    def _commit(self, which: Ints, counts: Ints, accepted: Ints, next_ids: Column, new_ids: list[list[int]]) -> None:
        after, has_drafts = self._ended(which, accepted + 1, next_ids), counts > 0
        after[:, col.FLAGS] |= col.CLAIMS
        after[:, col.TARGET_ASKED] = after[:, col.GENERATION]
        held = self._base[which] + np.minimum(accepted, counts - 1)
        after[:, col.DRAFT_HELD] = np.where(has_drafts, held, after[:, col.DRAFT_HELD])
        after[:, col.CREDIT] = np.maximum(after[:, col.CREDIT] - 1, 0)
        after[:, col.NUM_PLAIN] = np.where(has_drafts, 1, after[:, col.NUM_PLAIN] + 1)
        for place in which.tolist():
            self.speculations[place].is_ahead = True
        self._write(which, after, new_ids)
