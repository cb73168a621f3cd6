"""Drafting batch: sessions that wait for proposals, and what their targets are asked once these are there.

All but the draft tokens and their supports is put down while the draft computes. Proposals that are what was asked for
are told by comparing bytes, and go to the target as they came; or they went there already, by a proposal channel, and
the target knows what it is to score since the draft began.

Shape letters: ``B`` sessions of a batch, ``N`` answers, ``K`` draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.columns import I4, U4, U8, AnswerColumns, Column, ScoreColumns, chain_rows
from outrider.prefix_hash import BLOCK_TOKENS
from outrider.types import SparseEvidence
from outrider_coordinator.acceptance.vectorized import are_sound_columns
from outrider_coordinator.session import steps
from outrider_coordinator.session.answered import AnsweredProposals, Bools, Heads, Ints, Places, ints, listed, those
from outrider_coordinator.session.scores_ahead import ScoresAhead
from outrider_coordinator.session.service_state import Readiness
from outrider_coordinator.session.session_rows import SessionRows
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.speculation import DraftLengthPolicy


class DraftingBatch(SessionRows, ScoresAhead):
    """Sessions that wait for proposals."""

    _ROWS = (
        "numbers", "_asked", "_bases", "_lengths", "_generations", "_ahead", "_kept", "_last", "_limits", "_rests",
        "_chains", "_is_sparse",
    )  # fmt: skip

    def __init__(self, sessions: Sequence[SessionState]) -> None:
        """``sessions`` for which ``may_hold`` is true."""
        asked = [session.draft.asked for session in sessions]
        hashes = [session.tokens.prefix_hash(session.target.held) for session in sessions]
        self.sessions = sessions
        self.numbers = np.array([session.commands.session for session in sessions], dtype=U8)
        self._asked = ints([found.generation for found in asked if found])
        self._bases = ints([session.tokens.length for session in sessions])
        self._lengths = ints([found.draft_length for found in asked if found])
        self._generations = np.array([session.commands.next_generation for session in sessions], dtype=U8)
        self._ahead = np.zeros_like(self._generations)
        self._kept = (self._bases - 1).astype(U4)
        self._last = np.array([session.tokens.last for session in sessions], dtype=I4)
        self._limits = ints([session.engine_request.rules.num_token_ids for session in sessions])
        self._rests = np.array([rest for _, rest in hashes], dtype=U8)
        self._chains = chain_rows([chain for chain, _ in hashes])
        self._is_sparse = np.array([is_sparse(session) for session in sessions])
        self.reads_states = sessions[0].draft.reads_states
        self._note_rows()

    def _note_rows(self) -> None:
        self._heads = Heads.of(self._asked, self._bases, self._lengths)
        self._limit = int(self._limits.min())
        self._chain_bytes = self._chains[self._kept >= BLOCK_TOKENS].tobytes()
        self._ones = np.ones(len(self.sessions), dtype=U4)
        self._speculations = [session.speculation for session in self.sessions]
        self._forms = {bool(is_sparse) for is_sparse in self._is_sparse}

    @staticmethod
    def may_hold(session: SessionState) -> bool:
        """Whether the target's next command is known but for the draft tokens and their supports."""
        draft, target, asked = session.draft, session.target, session.draft.asked
        return (
            asked is not None
            and session.status is SessionStatus.DRAFTING
            and asked.draft_length > 0
            and asked.length == session.tokens.length == target.held + 1
            and target.readiness is Readiness.OPEN
            and (not draft.reads_states or steps.hands_over_states(session))
            and (session.engine_request.rules.evidence_form is None or is_sparse(session))
            and not session.commands.trace_parent
        )

    def take(
        self,
        places: Places,
        rows: Places,
        answers: AnswerColumns[Any],
        policy: DraftLengthPolicy,
        *,
        plane: int = 0,
        channel: int = 0,
    ) -> AnsweredProposals | None:
        """The ``Score`` of these rows, whose answers are at ``places``; None if none can be taken. ``plane``: by which
        hidden states go; 0: inline, as no columns have them. ``channel``: by which proposals go directly now; 0: none.
        """
        if self.reads_states and not plane:
            return None
        batch, chosen = self, answers
        if isinstance(rows, slice) and self._are_as_asked(answers, policy):
            have_come = self._have_come(answers, plane, channel)
            if have_come and (commands := self._scores(answers, plane, self._ahead)) is not None:
                every = listed(slice(None), commands.counts)
                return AnsweredProposals(every, every, commands, is_direct=True)
        else:
            fits = self._fits(places, rows, answers, policy)
            if not (isinstance(rows, slice) and fits.all()):
                places, rows = those(places, answers.counts)[fits], those(rows, self._bases)[fits]
                if not rows.size:
                    return None
                batch, chosen = self.selected(rows), answers.selected(places)
        commands = batch._scores(chosen, plane, batch._generations)
        if commands is None:
            return None
        return AnsweredProposals(listed(places, commands.counts), listed(rows, commands.counts), commands)

    def _are_as_asked(self, answers: AnswerColumns[Any], policy: DraftLengthPolicy) -> bool:
        """Whether all answers are proposals of the length that was asked for, in the order of the rows."""
        ids = answers.token_ids
        return (
            self._heads.are_of(answers)
            and self._forms == {answers.is_sparse}
            and ids.item(ids.argmax()) < self._limit
            and (not self.reads_states or all(map(policy.is_to_draft, self._speculations)))
        )

    def _fits(
        self, places: Places, rows: Places, answers: AnswerColumns[Any], policy: DraftLengthPolicy
    ) -> Bools:  # [N]
        """Which answers are proposals for these rows."""
        counts = answers.counts[places].astype(np.int64)
        fits: Bools = answers.generations[places] == self._asked[rows]
        fits &= answers.base_lengths[places] == self._bases[rows]
        fits &= (counts > 0) & (counts <= self._lengths[rows])
        fits &= _highest(answers)[places] < self._limits[rows]
        fits &= self._is_sparse[rows] == answers.is_sparse
        if self.reads_states:
            fits &= np.array([policy.is_to_draft(self._speculations[row]) for row in listed(rows, self._bases)])
        return fits

    def _scores(self, answers: AnswerColumns[Any], plane: int, generations: Column) -> ScoreColumns | None:
        """What follows from answers to all rows; None if there is evidence that is not sound."""
        if answers.is_sparse and not are_sound_columns(answers, self._limits):
            return None
        return self._scores_of(answers, plane, generations)

    def _asked_for(self) -> tuple[Column, Column]:
        return self._lengths.astype(U4), self._asked.astype(U8)


def is_sparse(session: SessionState) -> bool:
    """Whether its proposals come with ``SparseEvidence``."""
    return session.engine_request.rules.evidence_form is SparseEvidence


def _highest(answers: AnswerColumns[Any]) -> Ints:  # [N]
    """The highest token of each answer; -1 for one without any."""
    found = np.full(answers.counts.size, -1, dtype=np.int64)
    has_tokens = np.flatnonzero(answers.counts)
    if has_tokens.size:
        starts = answers.counts.cumsum() - answers.counts
        found[has_tokens] = np.maximum.reduceat(answers.token_ids, starts[has_tokens].astype(np.intp))
    return found
