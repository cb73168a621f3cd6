"""Steady batches: the next commands of many sessions, put down while the services compute.

Whatever a service answers to a steady session, its next command is known but for a few numbers. So the commands of
all are made of columns, by array operations, as soon as the answers are there; the state machines run after the
commands have left, and confirm them (``steady``). A session that is out of the ordinary is in no such batch.

Batches here wait for proposals, and for scores of proposals; ``plain_batch`` has those of plain steps.

Shape letters: ``B`` sessions of a batch, ``N`` answers, ``K`` draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.columns import AnswerColumns, ExtendColumns, ScoreColumns, StateColumns, chain_rows
from outrider.prefix_hash import BLOCK_TOKENS, following
from outrider.types import JudgingRule, SparseEvidence
from outrider_coordinator.acceptance.vectorized import (
    ProposalCase,
    Rows,
    are_sound_columns,
    has_fitting_shapes,
    judge_columns,
)
from outrider_coordinator.session import steps
from outrider_coordinator.session.answered import (
    AnsweredProposals,
    AnsweredScores,
    Bools,
    Ints,
    Places,
    ints,
    listed,
    those,
)
from outrider_coordinator.session.service_state import Readiness
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.speculation import LONGEST_INLINE_FEED, DraftLengthPolicy

_ANY_LENGTH = 1 << 40
_TOKEN_RULES = (JudgingRule.GREEDY, JudgingRule.COUPLED)


class DraftingBatch:
    """Sessions that wait for proposals."""

    def __init__(self, sessions: Sequence[SessionState]) -> None:
        """``sessions`` for which ``may_hold`` is true."""
        asked = [session.draft.asked for session in sessions]
        hashes = [session.tokens.prefix_hash(session.target.held) for session in sessions]
        self.sessions = sessions
        self.numbers = ints([session.commands.session for session in sessions])
        """Of the sessions, on their links."""
        self._asked = ints([found.generation for found in asked if found])
        self._bases = ints([session.tokens.length for session in sessions])
        self._lengths = ints([found.draft_length for found in asked if found])
        self._generations = ints([session.commands.next_generation for session in sessions])
        self._last = ints([session.tokens.last for session in sessions])
        self._limits = ints([session.engine_request.rules.num_token_ids for session in sessions])
        self._rests = ints([rest for _, rest in hashes])
        self._chains = chain_rows([chain for chain, _ in hashes])
        self._speculations = [session.speculation for session in sessions]
        self.reads_states = sessions[0].draft.reads_states
        """Whether their draft is handed hidden states; it is the same for all."""
        self._is_sparse = np.array([_is_sparse(session) for session in sessions])

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
            and (session.engine_request.rules.evidence_form is None or _is_sparse(session))
            and not session.commands.trace_parent
        )

    def take(
        self, places: Places, rows: Places, answers: AnswerColumns[Any], policy: DraftLengthPolicy, plane: int = 0
    ) -> AnsweredProposals | None:
        """The ``Score`` of these rows, whose answers are at ``places``; None if none can be taken. ``plane``: by which
        hidden states go; 0: inline, as no columns have them.
        """
        if self.reads_states and not plane:
            return None
        counts = answers.counts[places].astype(np.int64)
        tokens = _padded(answers, places, counts)  # [N, K], -1 where there is none
        fits = (answers.generations[places] == self._asked[rows]) & (answers.base_lengths[places] == self._bases[rows])
        fits &= (counts > 0) & (counts <= self._lengths[rows]) & (tokens.max(axis=1) < self._limits[rows])
        fits &= self._is_sparse[rows] == answers.is_sparse
        if self.reads_states:
            own = [self._speculations[row] for row in listed(rows, self._bases)]
            fits &= np.array([policy.is_to_draft(session) for session in own])
        if not fits.any():
            return None
        if not fits.all():
            places, rows = those(places, answers.counts)[fits], those(rows, self._bases)[fits]
            counts, tokens = counts[fits], tokens[fits]
        kept = self._bases[rows] - 1
        supports = None
        if answers.is_sparse:
            chosen = answers if isinstance(places, slice) else answers.selected(places)
            if not are_sound_columns(chosen, self._limits[rows]):
                return None
            supports = chosen.supports
        commands = ScoreColumns(
            self.numbers[rows],
            self._generations[rows],
            kept,
            self._chains[rows][kept >= BLOCK_TOKENS].tobytes(),
            self._rests[rows],
            np.ones(kept.size, dtype=np.int64),
            self._last[rows],
            counts,
            tokens[tokens >= 0],
            kept if self.reads_states else None,
            plane if self.reads_states else 0,
            None if supports is None else supports.counts,
            None if supports is None else supports.token_ids,
        )
        return AnsweredProposals(listed(places, kept), listed(rows, kept), commands)


class ScoringBatch:
    """Sessions that wait for scores of a proposal."""

    def __init__(self, sessions: Sequence[SessionState]) -> None:
        """``sessions`` for which ``may_hold`` is true."""
        drafts = [session.proposal.token_ids for session in sessions]
        hashes = [session.tokens.prefix_hash(session.tokens.length) for session in sessions]
        width = max(map(len, drafts))
        self.sessions = sessions
        self.numbers = ints([session.commands.session for session in sessions])
        """Of the sessions, on their links."""
        self._asked = ints([session.target.asked or 0 for session in sessions])
        self._bases = ints([session.tokens.length for session in sessions])
        self._counts = ints([len(draft) for draft in drafts])
        self._drafts = ints([(*draft, *[-1] * (width - len(draft))) for draft in drafts])  # [B, K]
        self._generations = ints([session.commands.next_generation for session in sessions])
        self._remaining = ints([session.output.num_remaining for session in sessions])
        self._longest = ints([session.draft.facts.max_length or _ANY_LENGTH for session in sessions])
        self._limits = ints([session.engine_request.rules.num_token_ids for session in sessions])
        self._endings = sorted(frozenset().union(*(session.output.ending_token_ids for session in sessions)))
        rests = [following(rest, draft[:-1]) for (_, rest), draft in zip(hashes, drafts, strict=True)]
        self._rests = ints([(*each, *[0] * (width - len(each))) for each in rests])  # [B, K] after 0 to K-1 drafts
        self._chains = chain_rows([chain for chain, _ in hashes])
        self._speculations = [session.speculation for session in sessions]
        self._reads_states = sessions[0].draft.reads_states
        self._seeds = np.array([session.engine_request.seed for session in sessions], dtype=np.uint64)
        cases = [case for session in sessions if (case := _sparse_case(session)) is not None]
        self._supports = Rows.of(cases) if len(cases) == len(sessions) else None
        """Of the proposals; None: they have no evidence."""

    @staticmethod
    def may_hold(session: SessionState) -> bool:
        """Whether the draft's next command is known but for the verdict."""
        draft, proposal, base = session.draft, session.proposal, session.tokens.length
        return (
            bool(proposal.token_ids)
            and session.status is SessionStatus.SCORING
            and not session.is_paused
            and session.target.asked is not None
            and session.target.part is None
            and session.is_plain_request
            and not session.output.has_stops
            and (not draft.reads_states or steps.hands_over_states(session))
            and (session.engine_request.rules.rule in _TOKEN_RULES or _sparse_case(session) is not None)
            and draft.readiness is Readiness.OPEN
            and draft.asked is None
            and draft.held == base
            and proposal.opened == draft.opened
            and base // BLOCK_TOKENS == (base + len(proposal.token_ids)) // BLOCK_TOKENS
            and not session.commands.trace_parent
        )

    def take(
        self, places: Places, rows: Places, answers: AnswerColumns[Any], policy: DraftLengthPolicy
    ) -> AnsweredScores | None:
        """The verdicts on these rows, whose answers are at ``places``, and the ``Extend`` that follow; None if none can
        be taken.
        """
        if self._reads_states != (answers.states is not None):
            return None
        drafted, bases = self._counts[rows], self._bases[rows]
        counts = answers.counts[places].astype(np.int64)
        fits = (answers.generations[places] == self._asked[rows]) & (answers.base_lengths[places] == bases)
        fits &= counts == drafted + 1
        if not fits.any():
            return None
        if not fits.all():  # what does not answer the proposals cannot be judged beside what does
            places, rows = those(places, answers.counts)[fits], those(rows, self._bases)[fits]
            drafted, bases, counts = drafted[fits], bases[fits], counts[fits]
        judged = self._judge(places, rows, answers, counts)
        if judged is None:
            return None
        accepted, following_ids, fits = judged
        own = self._drafts[rows]
        own = np.concatenate((own, np.full((len(own), 1), -1)), axis=1)
        own[np.arange(len(own)), accepted] = following_ids
        fits &= ~_any_ending(own, self._endings, accepted)
        remaining = self._remaining[rows] - accepted - 1
        wanted = ints(policy.lengths([self._speculations[row] for row in listed(rows, bases)]))
        lengths = np.minimum(np.minimum(wanted, remaining - 1), self._longest[rows] - bases - accepted - 1)
        fits &= (remaining > 0) & (lengths > 0)
        if answers.states is not None:
            fits &= (answers.states.starts[places] == bases - 1) & (answers.states.counts[places] == counts)
            fits &= accepted < LONGEST_INLINE_FEED
        if not fits.any():
            return None
        if not fits.all():
            places, rows = those(places, answers.counts)[fits], those(rows, self._bases)[fits]
            accepted, drafted, bases = accepted[fits], drafted[fits], bases[fits]
            following_ids, lengths, own = following_ids[fits], lengths[fits], own[fits]
        if answers.states is None:
            commands = self._extends(rows, drafted, accepted, following_ids, lengths)
        else:
            commands = self._extends_with_states(
                rows, own, accepted, lengths, _of(answers.states, places, accepted + 1)
            )
        places_taken, rows_taken = listed(places, bases), listed(rows, bases)
        return AnsweredScores(places_taken, rows_taken, accepted.tolist(), following_ids.tolist(), commands)

    def _extends(
        self, rows: Places, drafted: Ints, accepted: Ints, following_ids: Ints, lengths: Ints
    ) -> ExtendColumns:  # [N] each
        kept_drafts = np.minimum(accepted, drafted - 1)
        kept = self._bases[rows] + kept_drafts
        # After K acceptances the draft lacks the last of its own tokens too.
        lacks_two = accepted == drafted
        every = np.arange(kept.size)
        brought = np.empty((kept.size, 2), dtype=np.int64)
        brought[:, 0] = np.where(lacks_two, self._drafts[rows][every, drafted - 1], -1)
        brought[:, 1] = following_ids
        return ExtendColumns(
            self.numbers[rows],
            self._generations[rows],
            kept,
            self._chains[rows][kept >= BLOCK_TOKENS].tobytes(),
            self._rests[rows][every, kept_drafts],
            lacks_two + 1,
            brought[brought >= 0],
            lengths,
        )

    def _extends_with_states(
        self, rows: Places, own: Ints, accepted: Ints, lengths: Ints, states: StateColumns
    ) -> ExtendColumns:
        """A draft that reads hidden states computes its own tokens anew: all that are new to the text are brought, the
        first of each row of ``own`` [N, K+1].
        """
        kept = self._bases[rows]
        return ExtendColumns(
            self.numbers[rows],
            self._generations[rows],
            kept,
            self._chains[rows][kept >= BLOCK_TOKENS].tobytes(),
            self._rests[rows][:, 0],
            accepted + 1,
            own[np.arange(own.shape[1]) <= accepted[:, None]],
            lengths,
            states,
        )

    def _judge(
        self, places: Places, rows: Places, answers: AnswerColumns[Any], counts: Ints
    ) -> tuple[Ints, Ints, Bools] | None:
        """Of each session the number of accepted tokens, the token after them, and whether both may be: None if each
        has to be judged alone.
        """
        limits = self._limits[rows]
        if self._supports is not None:
            supports = self._supports if isinstance(rows, slice) else self._supports.selected(rows)
            chosen = answers if isinstance(places, slice) else answers.selected(places)
            judged = judge_columns(supports, chosen, limits=limits, seeds=self._seeds[rows], bases=self._bases[rows])
            return None if judged is None else (*judged, np.ones(limits.size, dtype=np.bool_))
        if answers.is_sparse:
            return None
        own = _padded(answers, places, counts)  # [N, K+1]
        drafts = self._drafts[rows][:, : own.shape[1] - 1]  # [N, K], -1 where there is none
        accepted = _num_leading(own[:, : drafts.shape[1]] == drafts)
        following_ids = own[np.arange(len(own)), np.minimum(accepted, own.shape[1] - 1)]
        return accepted, following_ids, own.max(axis=1) < limits


def _of(states: StateColumns, places: Places, counts: Ints) -> StateColumns:
    """The first ``counts`` rows of these sessions."""
    return StateColumns(
        states.plane_id,
        states.width,
        states.dtype,
        states.starts[places],
        counts,
        states.offsets_bytes[places],
        states.sequences[places],
    )


def _is_sparse(session: SessionState) -> bool:
    """Whether its proposals come with ``SparseEvidence``."""
    return session.engine_request.rules.evidence_form is SparseEvidence


def _sparse_case(session: SessionState) -> ProposalCase | None:
    """The proposal of a session that is judged by sparse rejection, token by token."""
    rules, proposal = session.engine_request.rules, session.proposal
    if rules.rule is not JudgingRule.REJECTION or rules.verifies_blocks:
        return None
    if not isinstance(proposal.evidence, SparseEvidence):
        return None
    case = ProposalCase(proposal.token_ids, proposal.evidence, rules.num_token_ids)
    return case if has_fitting_shapes(case) else None


def _padded(answers: AnswerColumns[Any], places: Places, counts: Ints) -> Ints:  # -> [N, widest]
    """The tokens of these answers; -1 after them."""
    width = max(1, int(counts.max()))
    rows, ids = len(counts), answers.token_ids
    if rows == len(answers.counts) and ids.size == rows * width and int(counts.min()) == width:
        return ids.reshape(rows, width).astype(np.int64)[places]
    starts = (answers.counts.cumsum() - answers.counts)[places].astype(np.int64)
    columns = np.arange(width)
    at = np.minimum(starts[:, None] + columns, max(ids.size - 1, 0))
    if not ids.size:
        return np.full((rows, width), -1, dtype=np.int64)
    return np.where(columns < counts[:, None], ids[at].astype(np.int64), -1)


def _num_leading(kept: Bools) -> Ints:  # [N, K] -> [N]
    """How many entries of each row are true before the first false one."""
    found: Ints = np.logical_and.accumulate(kept, axis=1).sum(axis=1)
    return found


def _any_ending(own: Ints, endings: Sequence[int], accepted: Ints) -> Bools:  # own [N, K+1] -> [N]
    """Whether one of the tokens up to the one after the accepted ones ends a generation."""
    if not endings:
        return np.zeros(len(own), dtype=np.bool_)
    ends = np.isin(own, endings) & (np.arange(own.shape[1]) <= accepted[:, None])
    found: Bools = np.logical_or.reduce(ends, axis=1)
    return found
