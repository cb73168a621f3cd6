"""Prepared proposals: sessions that wait for their drafts, and what their target is asked once the proposals are there.

Shape letters: ``B`` sessions, ``C`` columns of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from outrider.batched import I4, U4, U8, AnswerBatch, Column, ScoreAhead, ScoreBatch, SupportBatch
from outrider_coordinator.acceptance.joint_verdicts import PlacedEvidence, SupportedProposals
from outrider_coordinator.acceptance.vectorized import SupportRows, are_sound
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.prepared import NO_IDS, Bools, Prepared
from outrider_coordinator.session.state import DRAFTING, SCORING
from outrider_coordinator.session.table import NO_TOKEN, Ints, SessionTable
from outrider_coordinator.speculation import DraftLengthPolicy

_UNUSUAL = 3 << col.TARGET_READINESS


@dataclass(slots=True)
class TakenProposals:
    """Proposals that were taken to the target, in the order of the answers."""

    commands: ScoreBatch
    is_direct: bool
    """The target has them already, by a proposal channel."""
    commit: Callable[[], None]
    """Writes the rows as they are from now on. Called once the commands have left, or before anything else happens."""


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

    def __init__(self, table: SessionTable, index: Ints, rows: Ints) -> None:
        super().__init__(table, index, rows, col.DRAFT_ASKED)
        self._asked = rows[:, col.DRAFT_LENGTH].astype(U4)
        generations = rows[:, col.GENERATION].astype(U8)
        self._announced = generations if rows[:, col.ANNOUNCED].tolist() == generations.tolist() else None
        self._generations_next = generations + U8.type(1)
        self._kept = self.bases - U4.type(1)
        rests, chains = self.hashes(rows[:, col.TARGET_HELD].tolist())
        self._rests, self._chains = np.array(rests, dtype=U8), b"".join(chains)
        self._ones = np.ones(len(rows), dtype=U4)
        self._hands_over = self.hands_over_states()

    def take(
        self, answers: AnswerBatch[Any], policy: DraftLengthPolicy, *, plane: int = 0, is_direct: bool = False
    ) -> TakenProposals | None:
        """Bring proposals, answers to all of these sessions, to their target; None if they cannot be taken together.

        ``plane``: by which hidden states go; 0: inline. ``is_direct``: the target has them, and a ``ScoreAhead``.
        """
        is_whole = answers.counts.tobytes() == self._asked.tobytes()
        if not self._are_sound(answers, is_whole=is_whole):
            return None
        if self.reads_states and not (plane and all(map(policy.is_to_draft, self.speculations))):
            return None
        is_direct = is_direct and self._announced is not None
        generations = self._announced if is_direct and self._announced is not None else self._generations_next
        commands = self._arrays(generations, answers.counts, answers.token_ids, plane, answers.supports)
        return TakenProposals(commands, is_direct, partial(self._commit, answers, generations))

    def _are_sound(self, answers: AnswerBatch[Any], *, is_whole: bool) -> bool:
        """True if all can be judged."""
        counts, ids = answers.counts, answers.token_ids
        if not (self._hands_over and self.is_uniform) or answers.is_sparse != self.is_sparse or not ids.size:
            return False
        if not is_whole and not ((counts > 0) & (counts <= self._asked)).all():
            return False
        known = ids.view(U4) if ids.dtype == I4 else ids  # a negative one is high, too
        if known.item(known.argmax()) >= self.limit:
            return False
        if not self.is_sparse:
            return True
        return answers.supports is not None and are_sound(SupportRows.of_batch(answers), self.limits)

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
            self._rests,
            self._ones,
            self.rows[:, col.LAST],
            lengths,
            draft_token_ids,
            self._kept if self.reads_states else None,
            plane if self.reads_states else 0,
            None if supports is None else supports.counts,
            None if supports is None else supports.token_ids,
            trace_parents=self.trace_parents,
        )

    def _commit(self, answers: AnswerBatch[Any], generations: Column) -> None:
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
        if answers.is_sparse:
            seeds, bases = self.rows[:, col.SEED].copy().view(np.uint64), self.rows[:, col.LENGTH]
            proposals = SupportedProposals(SupportRows.of_batch(answers), limits=self.limits, seeds=seeds, bases=bases)
            for case, session in enumerate(self.sessions):
                session.row.evidence = PlacedEvidence(proposals, case)


def announce(table: SessionTable, index: Ints) -> None:
    """Reserve the generations of a ``ScoreAhead``."""
    table.values[index, col.GENERATION] += 1
    table.values[index, col.ANNOUNCED] = table.values[index, col.GENERATION]
