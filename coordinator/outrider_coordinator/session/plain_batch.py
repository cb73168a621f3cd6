"""Plain batch: sessions that wait for scores of a plain step, and are expected to go on with another.

What each is asked next follows from its last step but for one token. So a batch is made of its sessions once; from
then on the batch after a step follows from the one before it by array operations (``following``), and sessions that
become steady later are put beside the others (``joined``).

Shape letters: ``B`` sessions of a batch, ``N`` answers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import AnswerColumns, ScoreColumns, chain_rows, following_rests
from outrider.prefix_hash import BLOCK_TOKENS
from outrider.types import JudgingRule
from outrider_coordinator.acceptance.evidence import TARGET_SUM_TOLERANCE
from outrider_coordinator.session import steps
from outrider_coordinator.session.answered import AnsweredScores, Ints, Places, ints, listed, those
from outrider_coordinator.session.service_state import Readiness
from outrider_coordinator.session.session_rows import SessionRows
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.speculation.session_state import ControlledSession

_RULES = (JudgingRule.GREEDY, JudgingRule.COUPLED, JudgingRule.REJECTION)
"""Whose plain step is judged by taking the token that the target drew."""


class PlainBatch(SessionRows):
    """Sessions that wait for scores of a plain step, as columns. Not changed once it is made."""

    _ROWS = (
        "numbers", "_asked", "_bases", "_generations", "_remaining", "_limits", "_is_sparse", "_rests", "_chains",
        "_has_draft",
    )  # fmt: skip

    def __init__(self, sessions: Sequence[SessionState]) -> None:
        """``sessions`` for which ``may_hold`` is true."""
        rules = [session.engine_request.rules for session in sessions]
        self.sessions = sessions
        self.numbers = ints([session.commands.session for session in sessions])
        """Of the sessions, on their links."""
        self._asked = ints([session.target.asked or 0 for session in sessions])
        self._bases = ints([session.tokens.length for session in sessions])
        self._generations = ints([session.commands.next_generation for session in sessions])
        self._remaining = ints([session.output.num_remaining for session in sessions])
        self._limits = ints([own.num_token_ids for own in rules])
        self._is_sparse = np.array([own.rule is JudgingRule.REJECTION for own in rules])
        self._rests, self._chains = _hashes(sessions)
        self._has_draft = np.array([session.draft.is_usable for session in sessions])
        self._note_rows()

    def _note_rows(self) -> None:
        sessions = self.sessions
        self._endings = sorted(frozenset().union(*(session.output.ending_token_ids for session in sessions)))
        self._speculations = [session.speculation for session in sessions]
        self._reads_states = any(session.draft.reads_states for session in sessions)

    @staticmethod
    def may_hold(session: SessionState) -> bool:
        """Whether the target's next command is known but for one token."""
        return (
            not session.proposal.token_ids
            and session.status is SessionStatus.SCORING
            and not session.is_paused
            and session.target.asked is not None
            and session.target.part is None
            and session.target.held == session.tokens.length - 1
            and session.is_plain_request
            and not session.output.has_stops
            and session.engine_request.rules.rule in _RULES
            and session.target.readiness is Readiness.OPEN
            and not session.commands.trace_parent
        )

    def take(
        self, places: Places, rows: Places, answers: AnswerColumns[Any], policy: DraftLengthPolicy
    ) -> AnsweredScores | None:
        """The tokens of these rows, whose answers are at ``places``, and the ``Score`` that follow; None if none can be
        taken.
        """
        bases, remaining = self._bases[rows], self._remaining[rows] - 1
        fits = (answers.generations[places] == self._asked[rows]) & (answers.base_lengths[places] == bases)
        fits &= answers.counts[places] == 1
        if not fits.any():
            return None
        starts = (answers.counts.cumsum() - answers.counts)[places]
        at = np.minimum(starts, max(answers.token_ids.size - 1, 0))  # where there is no token, none is taken
        tokens = answers.token_ids[at].astype(np.int64)
        fits &= (tokens >= 0) & (tokens < self._limits[rows]) & (remaining > 0)
        fits &= self._is_sparse[rows] == (answers.outside_masses is not None)
        if answers.outside_masses is not None:
            fits &= np.abs(answers.outside_masses[at].astype(np.float64) - 1.0) <= TARGET_SUM_TOLERANCE
        if self._endings:
            fits &= ~np.isin(tokens, self._endings)
        fits &= np.array(policy.are_plain(self._speculations_of(rows))) | ~self._has_draft[rows]
        if self._reads_states:
            own = [self.sessions[row] for row in listed(rows, self._bases)]
            fits &= ~np.array([steps.is_to_follow(session) for session in own])
        if not fits.any():
            return None
        if not fits.all():
            places, rows = those(places, answers.counts)[fits], those(rows, self._bases)[fits]
            bases, tokens = bases[fits], tokens[fits]
        commands = ScoreColumns(
            self.numbers[rows],
            self._generations[rows],
            bases,
            self._chains[rows][bases >= BLOCK_TOKENS].tobytes(),
            self._rests[rows],
            np.ones(bases.size, dtype=np.int64),
            tokens,
            np.zeros(bases.size, dtype=np.int64),
            tokens[:0],
        )
        nothing_accepted = np.zeros(bases.size, dtype=np.int64)
        return AnsweredScores(listed(places, bases), listed(rows, bases), nothing_accepted, tokens, commands)

    def _speculations_of(self, rows: Places) -> Sequence[ControlledSession]:
        own = self._speculations
        return own if isinstance(rows, slice) else [own[row] for row in rows.tolist()]

    def following(self, rows: Places, tokens: Ints) -> PlainBatch:  # tokens [N]
        """The batch of these rows once the state machines have taken in ``tokens``, and the ``Score`` that follow were
        sent: what a batch made of the sessions then would be.
        """
        found = self if isinstance(rows, slice) else self.selected(rows)
        found = copy.copy(found)
        found._rests = following_rests(found._rests, tokens)
        found._asked = found._generations
        found._bases, found._generations = found._bases + 1, found._generations + 1
        found._remaining = found._remaining - 1
        begun = np.flatnonzero(found._bases % BLOCK_TOKENS == 0)
        if begun.size:  # a block of the prefix hash is full
            own = _hashes([found.sessions[row] for row in begun.tolist()])
            found._chains = found._chains.copy()
            found._rests[begun], found._chains[begun] = own
        return found

    def joined(self, other: PlainBatch) -> PlainBatch:
        """The sessions of this batch and then those of the other."""
        found = copy.copy(self)
        found.sessions = [*self.sessions, *other.sessions]
        for name in self._ROWS:
            setattr(found, name, np.concatenate((getattr(self, name), getattr(other, name))))
        found._note_rows()
        return found


def _hashes(sessions: Sequence[SessionState]) -> tuple[Ints, NDArray[np.uint8]]:  # [B], [B, CHAIN_BYTES]
    """Rests and chains of the prefix hashes of the sessions' texts."""
    hashes = [session.tokens.prefix_hash(session.tokens.length) for session in sessions]
    return ints([rest for _, rest in hashes]), chain_rows([chain for chain, _ in hashes])
