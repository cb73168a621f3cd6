"""Prepared proposals: sessions that wait for their drafts, and what their target is asked once the proposals are there.

Shape letters: ``B`` sessions, ``C`` columns of the table.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from outrider.batched import I4, U4, U8, AnswerBatch, Column, ScoreAhead, ScoreBatch, SupportBatch
from outrider_coordinator.acceptance.joint_verdicts import PlacedEvidence, SupportedProposals
from outrider_coordinator.acceptance.vectorized import SupportRows, are_sound
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.prepared import NO_IDS, Bools, Prepared, Taken
from outrider_coordinator.session.state import DRAFTING, SCORING
from outrider_coordinator.session.table import NO_TOKEN, Ints, SessionTable
from outrider_coordinator.speculation import DraftLengthPolicy

_UNUSUAL = 3 << col.TARGET_READINESS


def waits_for_proposal(rows: Ints) -> Bools:  # [B, C] -> [B]
    """Rows that wait for a proposal, and are usual."""
    found: Bools = rows[:, col.FLAGS] & _UNUSUAL == 0
    found &= rows[:, col.STATUS] == DRAFTING
    found &= rows[:, col.DRAFT_LENGTH] > 0
    found &= rows[:, col.LENGTH] == rows[:, col.DRAFT_BASE]
    found &= rows[:, col.LENGTH] - rows[:, col.TARGET_HELD] == 1
    return found


class PreparedProposals(Prepared):
    """Sessions, all usual, that wait for proposals."""

    asked = col.DRAFT_ASKED

    def __init__(self, table: SessionTable, index: Ints, rows: Ints) -> None:
        super().__init__(table, index, rows)
        self._asked = rows[:, col.DRAFT_LENGTH].astype(U4)
        generations = rows[:, col.GENERATION].astype(U8)
        self._announced = generations if rows[:, col.ANNOUNCED].tolist() == generations.tolist() else None
        self._generations_next = generations + U8.type(1)
        self._kept = self.bases - U4.type(1)
        tails, chains = self.hashes(rows[:, col.TARGET_HELD].tolist())
        self._hash_tails, self._chains = np.array(tails, dtype=U8), b"".join(chains)
        self._ones, self._lasts = np.ones(len(rows), dtype=U4), rows[:, col.LAST].astype(I4)
        self._hands_over = self.hands_over_states()

    @classmethod
    def fit(cls, rows: Ints, answers: AnswerBatch[Any]) -> Bools:  # [B, C] -> [B]
        """Rows that wait for proposals, and have known tokens, no more than were asked for."""
        counts, found = answers.counts, waits_for_proposal(rows)
        found &= (counts > 0) & (counts <= rows[:, col.DRAFT_LENGTH])
        found &= (rows[:, col.FLAGS] & col.IS_SPARSE != 0) == answers.is_sparse
        found &= _highest(answers) < rows[:, col.LIMIT]
        return found

    def is_of(self, answers: AnswerBatch[Any]) -> bool:
        """True if these are proposals in order for all of these sessions, whose rows have not changed since."""
        counts, known = answers.counts, answers.unsigned_ids
        if not super().is_of(answers) or not self.is_uniform or answers.is_sparse != self.is_sparse:
            return False
        if counts.tobytes() != self._asked.tobytes() and not ((counts > 0) & (counts <= self._asked)).all():
            return False
        return bool(known.item(known.argmax()) < self.limit)

    def take(
        self, answers: AnswerBatch[Any], policy: DraftLengthPolicy, *, plane: int = 0, is_direct: bool = False
    ) -> Taken | None:
        """Bring proposals, answers to all of these sessions, to their target; None if they cannot be taken together.

        ``plane``: by which hidden states go; 0: inline. ``is_direct``: the target has them, and a ``ScoreAhead``.
        """
        supports = SupportRows.of_batch(answers) if self.is_sparse and answers.supports is not None else None
        if not self._hands_over or not self._are_supported(supports):
            return None
        if self.reads_states and not (plane and all(map(policy.is_to_draft, self.speculations))):
            return None
        is_direct = is_direct and self._announced is not None
        generations = self._announced if is_direct and self._announced is not None else self._generations_next
        commands = self._arrays(generations, answers.counts, answers.token_ids, plane, answers.supports)
        commit = partial(self._commit, answers, supports, generations)
        return Taken(range(len(self.sessions)), commands, commit, is_direct=is_direct)

    def _are_supported(self, supports: SupportRows | None) -> bool:
        """True if all can be judged by their supports, if they are to have any."""
        return not self.is_sparse or (supports is not None and are_sound(supports, self.limits))

    def announcement(self, channel: int, plane: int) -> ScoreAhead | None:
        """Scores for the target to compute when the proposals come by a channel; None unless ``announce`` was called
        for these rows.
        """
        if self._announced is None or not (self._hands_over and self.is_uniform):
            return None
        generations = np.frombuffer(self._generations, dtype=U8)
        return ScoreAhead(self._arrays(self._announced, self._asked, NO_IDS, plane, None), channel, generations)

    def _arrays(
        self, generations: Column, lengths: Column, draft_token_ids: Column, plane: int, supports: SupportBatch | None
    ) -> ScoreBatch:
        return ScoreBatch(
            self.numbers,
            generations,
            self._kept,
            self._chains,
            self._hash_tails,
            self._ones,
            self._lasts,
            lengths,
            draft_token_ids,
            self._kept if self.reads_states else None,
            plane if self.reads_states else 0,
            None if supports is None else supports.counts,
            None if supports is None else supports.token_ids,
            trace_parents=self.trace_parents,
        )

    def _commit(self, answers: AnswerBatch[Any], supports: SupportRows | None, generations: Column) -> list[list[int]]:
        after, counts, table = self.rows.copy(), answers.counts, self.table
        after[:, col.STATUS] = SCORING
        after[:, col.ANNOUNCED : col.NUM_PLAIN + 1] = 0  # and what was asked of the draft, and its losses
        after[:, col.DRAFT_HELD] = self.bases
        after[:, col.PROPOSAL_OPENED] = after[:, col.DRAFT_OPENED]
        after[:, col.GENERATION] = after[:, col.TARGET_ASKED] = generations
        after[:, col.NUM_DRAFTED] = counts
        table.values[self.index] = after
        width, size = counts.item(counts.argmax()), counts.size
        if answers.token_ids.size == width * size:
            table.drafted[self.index, :width] = answers.token_ids.reshape(size, width)
        else:
            drafted = np.full((size, width), NO_TOKEN, dtype=U4)
            drafted[np.arange(width) < counts[:, None]] = answers.token_ids
            table.drafted[self.index, :width] = drafted
        if supports is not None:
            seeds, bases = self.rows[:, col.SEED].copy().view(np.uint64), self.rows[:, col.LENGTH]
            proposals = SupportedProposals(supports, limits=self.limits, seeds=seeds, bases=bases)
            for case, session in enumerate(self.sessions):
                session.row.evidence = PlacedEvidence(proposals, case)
        return []


def _highest(answers: AnswerBatch[Any]) -> Ints:
    """Highest token of each answer; -1 for one without any."""
    counts = answers.counts
    found = np.full(counts.size, -1, dtype=np.int64)
    has_tokens = np.flatnonzero(counts)
    if has_tokens.size:
        starts = counts.cumsum() - counts
        found[has_tokens] = np.maximum.reduceat(answers.unsigned_ids, starts[has_tokens].astype(np.intp))
    return found


def announce(table: SessionTable, index: Ints) -> None:
    """Reserve the generations of a ``ScoreAhead``."""
    table.values[index, col.GENERATION] += 1
    table.values[index, col.ANNOUNCED] = table.values[index, col.GENERATION]
