"""Drafting row: one session that waits for a proposal, and what its target is asked once it is there.

What ``DraftingBatch`` is for several sessions, by plain numbers (``scoring_row``). What is not a proposal that was
asked for is left to the session's state machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.columns import I4, U4, U8, AnswerColumns, Column
from outrider_coordinator.acceptance.vectorized import are_sound_columns
from outrider_coordinator.session.answered import AnsweredProposals, Places, ints
from outrider_coordinator.session.drafting_batch import is_sparse
from outrider_coordinator.session.scores_ahead import ScoresAhead
from outrider_coordinator.session.state import SessionState
from outrider_coordinator.speculation import DraftLengthPolicy

_ONE = np.ones(1, dtype=U4)


class DraftingRow(ScoresAhead):
    """One session that waits for a proposal."""

    def __init__(self, sessions: Sequence[SessionState]) -> None:
        """``sessions``: one, for which ``DraftingBatch.may_hold`` is true."""
        (session,) = self.sessions = sessions
        asked, base = session.draft.asked, session.tokens.length
        self.numbers = np.array((session.commands.session,), dtype=U8)
        self._asked, self._most = (asked.generation, asked.draft_length) if asked else (0, 0)
        self._base, self._limit = base, session.engine_request.rules.num_token_ids
        self._generations = np.array((session.commands.next_generation,), dtype=U8)
        self._ahead = np.zeros_like(self._generations)
        self._kept = np.array((base - 1,), dtype=U4)
        self._last = np.array((session.tokens.last,), dtype=I4)
        self._ones = _ONE
        self._chain_bytes, rest = session.tokens.prefix_hash(session.target.held)
        self._rests = np.array((rest,), dtype=U8)
        self._is_sparse = is_sparse(session)
        self._speculation = session.speculation
        self.reads_states = session.draft.reads_states

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
        """The ``Score`` that follows; None unless the proposal is all that a message brings, and was asked for.
        ``plane`` and ``channel`` as for ``DraftingBatch``.
        """
        if self.reads_states and not (plane and policy.is_to_draft(self._speculation)):
            return None
        if not (isinstance(rows, slice) and self._is_asked_for(answers)):
            return None
        if self._is_sparse and not are_sound_columns(answers, ints((self._limit,))):
            return None
        is_direct = self._have_come(answers, plane, channel) and answers.counts.item() == self._most
        generations = self._ahead if is_direct else self._generations
        return AnsweredProposals([0], [0], self._scores_of(answers, plane, generations), is_direct)

    def _asked_for(self) -> tuple[Column, Column]:
        return np.array((self._most,), dtype=U4), np.array((self._asked,), dtype=U8)

    def _is_asked_for(self, answers: AnswerColumns[Any]) -> bool:
        """Whether the one answer is a proposal of at most as many tokens as were asked for."""
        return (
            answers.generations.item() == self._asked
            and answers.base_lengths.item() == self._base
            and 1 <= answers.counts.item() <= self._most
            and answers.is_sparse == self._is_sparse
            and max(answers.token_ids.tolist()) < self._limit
        )
