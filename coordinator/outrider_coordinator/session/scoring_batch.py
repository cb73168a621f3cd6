"""Scoring batch: sessions that wait for scores of a proposal, and what their drafts are asked once these are there.

What is asked next depends on how many draft tokens are accepted and on the token after them. So it is put down for each
number that there may be while the target computes, and is looked up when it is known. Scores that answer the proposals
are told by comparing bytes.

Shape letters: ``B`` sessions of a batch, ``N`` answers, ``K`` draft tokens of the longest proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.columns import I4, U4, U8, AnswerColumns, Column, ExtendColumns, StateColumns, chain_rows
from outrider.prefix_hash import BLOCK_TOKENS, following
from outrider.types import JudgingRule, SparseEvidence
from outrider_coordinator.acceptance.joint_verdicts import JointVerdicts
from outrider_coordinator.acceptance.vectorized import ProposalCase, Rows, has_fitting_shapes
from outrider_coordinator.session import steps
from outrider_coordinator.session.answered import (
    AnsweredScores,
    Bools,
    Heads,
    Ints,
    Places,
    ints,
    listed,
    those,
)
from outrider_coordinator.session.service_state import Readiness
from outrider_coordinator.session.session_rows import SessionRows
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.speculation import LONGEST_INLINE_FEED, DraftLengthPolicy

_ANY_LENGTH = 1 << 40
_TOKEN_RULES = (JudgingRule.GREEDY, JudgingRule.COUPLED)
_NO_TOKEN = (1 << 32) - 1
"""Behind the tokens of a draft: no token of a vocabulary."""


class ScoringBatch(SessionRows):
    """Sessions that wait for scores of a proposal."""

    _ROWS = (
        "numbers", "_asked", "_bases", "_counts", "_drafts", "_generations", "_rooms", "_limits", "_ends", "_lasts",
        "_kept", "_rests", "_brought", "_chains",
    )  # fmt: skip

    def __init__(self, sessions: Sequence[SessionState]) -> None:
        """``sessions`` for which ``may_hold`` is true."""
        drafts = [session.proposal.token_ids for session in sessions]
        columns = max(map(len, drafts)) + 1
        self._endings = frozenset().union(*(session.output.ending_token_ids for session in sessions))
        self._reads_states = sessions[0].draft.reads_states
        self.sessions = sessions
        self.numbers = np.array([session.commands.session for session in sessions], dtype=U8)
        """Of the sessions, on their links."""
        self._asked = ints([session.target.asked or 0 for session in sessions])
        self._bases = ints([session.tokens.length for session in sessions])
        self._counts = ints([len(draft) for draft in drafts])
        self._drafts = np.array([_filled(draft, columns, _NO_TOKEN) for draft in drafts], dtype=U4)  # [B, K+1]
        self._generations = np.array([session.commands.next_generation for session in sessions], dtype=U8)
        self._rooms = ints([room(session) for session in sessions])
        self._limits = ints([session.engine_request.rules.num_token_ids for session in sessions])
        self._ends = ints([num_before(self._endings, draft) for draft in drafts])
        """Draft tokens of each before the first that ends a generation."""
        self._lasts = np.array([draft[-1] for draft in drafts], dtype=I4)
        self._put_down_extends(columns)
        self._verdicts = joint_verdicts(sessions)
        self._note_rows()

    def _put_down_extends(self, columns: int) -> None:
        """Kept tokens, running hashes after them, and how many tokens are brought, [B, K+1] by accepted draft tokens.

        A draft has KV for all but the last of its own tokens, so after K acceptances it lacks that one too. One that
        reads hidden states computes its own tokens anew.
        """
        hashes = [session.tokens.prefix_hash(session.tokens.length) for session in self.sessions]
        self._chains = chain_rows([chain for chain, _ in hashes])
        accepted, bases, counts = np.arange(columns), self._bases[:, None], self._counts[:, None]
        if self._reads_states:
            rests = [[rest] for _, rest in hashes]
            self._kept = np.broadcast_to(bases, (len(hashes), columns)).astype(U4)
            self._brought = np.broadcast_to(accepted + 1, (len(hashes), columns)).astype(U4)
        else:
            drafts = [session.proposal.token_ids for session in self.sessions]
            rests = [following(rest, draft[:-1]) for (_, rest), draft in zip(hashes, drafts, strict=True)]
            self._kept = (np.minimum(accepted, counts - 1) + bases).astype(U4)
            self._brought = ((accepted == counts) + 1).astype(U4)
        self._rests = np.array([_filled(each, columns, each[-1]) for each in rests], dtype=U8)

    def _note_rows(self) -> None:
        num_rows, columns = self._drafts.shape
        self._heads = Heads.of(self._asked, self._bases, self._counts + 1)
        self._limit = int(self._limits.min())
        self._least_room = int((self._rooms - self._counts).min())
        """For draft tokens of the next step, however many of this one are accepted."""
        self._has_ends = bool((self._ends < self._counts).any())
        self._firsts = np.arange(0, num_rows * columns, columns)
        """Of each row among all entries of ``_drafts``."""
        self._chain_bytes = self._chains[self._bases >= BLOCK_TOKENS].tobytes()
        self._draft_bytes = self._drafts[np.arange(columns) < self._counts[:, None]].tobytes()
        self._speculations = [session.speculation for session in self.sessions]
        starts = (self._counts + 1).cumsum() - self._counts - 1
        is_even = int(self._counts.min()) == columns - 1
        self._places = None if is_even else starts[:, None] + np.minimum(np.arange(columns), self._counts[:, None])
        """Where the scores of each row are among all, [B, K+1], the last repeated; None: they lie so."""

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
        self,
        places: Places,
        rows: Places,
        answers: AnswerColumns[Any],
        policy: DraftLengthPolicy,
        *,
        channel: int = 0,
    ) -> AnsweredScores | None:
        """The verdicts on these rows, whose answers are at ``places``, and the ``Extend`` that follow; None if none can
        be taken. ``channel``: by which proposals may go directly; 0: none.
        """
        if self._reads_states != (answers.states is not None):
            return None
        batch, chosen = self, answers
        if not (isinstance(rows, slice) and self._heads.are_of(answers)):
            fits = self._fits(places, rows, answers)
            # What does not answer the proposals cannot be judged beside what does.
            places, rows = those(places, answers.counts)[fits], those(rows, self._bases)[fits]
            if not rows.size:
                return None
            batch, chosen = self.selected(rows), answers.selected(places)
            batch._verdicts = None if self._verdicts is None else self._verdicts.selected(rows)
        if chosen.draft_token_ids is not None and not batch._are_of_proposals(chosen.draft_token_ids):
            return None
        judged = batch.judge(chosen)
        if judged is None:
            return None
        accepted, next_ids, fits = judged
        lengths = batch._lengths(accepted, policy)
        fits = fits & batch._goes_on(accepted, next_ids, lengths, chosen)
        states = chosen.states
        if fits is not True and not fits.all():
            own = np.flatnonzero(fits)
            if not own.size:
                return None
            batch, accepted, next_ids, lengths = batch.selected(own), accepted[own], next_ids[own], lengths[own]
            states = None if states is None else states.selected(own)
            places, rows = those(places, answers.counts)[own], those(rows, self._bases)[own]
        commands = batch._extends(accepted, next_ids, lengths, states, channel)
        return AnsweredScores(listed(places, accepted), listed(rows, accepted), accepted, next_ids, commands)

    def _fits(self, places: Places, rows: Places, answers: AnswerColumns[Any]) -> Bools:  # [N]
        """Which answers are scores of the proposals of these rows."""
        fits: Bools = answers.generations[places] == self._asked[rows]
        fits &= answers.base_lengths[places] == self._bases[rows]
        fits &= answers.counts[places].astype(np.int64) == self._counts[rows] + 1
        return fits

    def _are_of_proposals(self, draft_token_ids: Column) -> bool:
        """Whether the draft tokens that came to the target directly are those that came here."""
        return draft_token_ids.astype(U4, copy=False).tobytes() == self._draft_bytes

    def judge(self, answers: AnswerColumns[Any]) -> tuple[Ints, Column, Any] | None:
        """Of each row the number of accepted tokens, the token after them, and whether both may be (True: of all); None
        if each has to be judged alone.
        """
        if self._verdicts is not None:
            judged = self._verdicts.on_columns(answers)
            return None if judged is None else (*judged, True)
        if answers.is_sparse:
            return None
        ids = answers.token_ids
        own = ids.reshape(self._drafts.shape) if self._places is None else ids.take(self._places)  # [N, K+1]
        accepted = (own == self._drafts).argmin(axis=1)  # the first that differs, as there is no draft token at the end
        next_ids = own.ravel().take(accepted + self._firsts)
        return accepted, next_ids, ids.item(ids.argmax()) < self._limit or own.max(axis=1) < self._limits

    def _lengths(self, accepted: Ints, policy: DraftLengthPolicy) -> Column:  # -> [N]
        """Draft tokens to ask for; 0 or less where there is no room for any."""
        wanted = policy.lengths(self._speculations)
        if max(wanted) <= self._least_room:
            return np.array(wanted, dtype=U4)
        found: Ints = np.minimum(ints(wanted), self._rooms - accepted)
        return found

    def _goes_on(self, accepted: Ints, next_ids: Column, lengths: Column, answers: AnswerColumns[Any]) -> Any:  # noqa: ANN401
        """Which rows' generations go on with a proposal: True, or [N]."""
        fits: Any = True
        if lengths.item(lengths.argmin()) < 1:
            fits = fits & (lengths > 0)
        if self._endings and (self._has_ends or not self._endings.isdisjoint(next_ids.tolist())):
            fits = fits & (accepted <= self._ends) & ~np.isin(next_ids, sorted(self._endings))
        if (states := answers.states) is not None:
            fits = fits & (states.starts == self._bases - 1) & (states.counts == answers.counts)
            fits = fits & (accepted < LONGEST_INLINE_FEED)
        return fits

    def _extends(
        self, accepted: Ints, next_ids: Column, lengths: Column, states: StateColumns | None, channel: int
    ) -> ExtendColumns:  # [N] each
        at = accepted + self._firsts
        return ExtendColumns(
            self.numbers,
            self._generations,
            self._kept.take(at),
            self._chain_bytes,
            self._rests.take(at),
            self._brought.take(at),
            self._brought_ids(accepted, next_ids, at),
            lengths,
            None if states is None else replace(states, counts=accepted + 1),
            channel,
        )

    def _brought_ids(self, accepted: Ints, next_ids: Column, at: Ints) -> Column:
        """The tokens that the drafts lack, one row after the other."""
        if self._reads_states:
            own = self._drafts.copy()
            own.ravel()[at] = next_ids
            brought: Column = own[np.arange(own.shape[1]) <= accepted[:, None]]
            return brought
        lacks_two = accepted == self._counts
        if not np.count_nonzero(lacks_two):
            return next_ids
        pairs, is_brought = np.empty((accepted.size, 2), dtype=I4), np.ones((accepted.size, 2), dtype=np.bool_)
        pairs[:, 0], pairs[:, 1], is_brought[:, 0] = self._lasts, next_ids, lacks_two
        return pairs[is_brought]


def joint_verdicts(sessions: Sequence[SessionState]) -> JointVerdicts | None:
    """On the sessions' proposals; None: they have no evidence, or not all."""
    cases = [case for session in sessions if (case := _sparse_case(session)) is not None]
    if len(cases) < len(sessions):
        return None
    return JointVerdicts.of(
        Rows.of(cases),
        limits=ints([case.num_token_ids for case in cases]),
        seeds=np.array([session.engine_request.seed for session in sessions], dtype=np.uint64),
        bases=ints([session.tokens.length for session in sessions]),
    )


def _filled(values: Sequence[int], size: int, value: int) -> tuple[int, ...]:
    return (*values, *(value,) * (size - len(values)))


def room(session: SessionState) -> int:
    """For draft tokens of its next step, if none of this one is accepted."""
    longest = session.draft.facts.max_length or _ANY_LENGTH
    return min(session.output.num_remaining - 2, longest - session.tokens.length - 1)


def num_before(endings: frozenset[int], draft: Sequence[int]) -> int:
    """Draft tokens before the first that ends a generation."""
    return next((place for place, token_id in enumerate(draft) if token_id in endings), len(draft))


def _sparse_case(session: SessionState) -> ProposalCase | None:
    """The proposal of a session that is judged by sparse rejection, token by token."""
    rules, proposal = session.engine_request.rules, session.proposal
    if rules.rule is not JudgingRule.REJECTION or rules.verifies_blocks:
        return None
    if not isinstance(proposal.evidence, SparseEvidence):
        return None
    case = ProposalCase(proposal.token_ids, proposal.evidence, rules.num_token_ids)
    return case if has_fitting_shapes(case) else None
