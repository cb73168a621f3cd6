"""Transitions of many sessions at once: from proposals to what targets score, and from scores to what is asked next.

``prepare`` computes what follows from the next answers to some rows of a ``SessionTable`` while services compute;
``proposals_for`` and ``scores_for`` do so on the spot, for those answers that are in order. Each works for any number
of sessions from 1 on. Answers that are out of the ordinary, and rows in a state that is, are left to the transitions of
one session on the same rows (``draft_events``, ``target_events``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from outrider.batched import U4, AnswerBatch, Column
from outrider.types import HiddenStates
from outrider_coordinator.session import drafting, steps
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.actions import StepEnded
from outrider_coordinator.session.prepared import Bools, PreparedScores
from outrider_coordinator.session.prepared_claims import PreparedClaims, waits_for_claimed
from outrider_coordinator.session.prepared_proposals import PreparedProposals, waits_for_proposal
from outrider_coordinator.session.prepared_tokens import PreparedTokens, waits_for_token
from outrider_coordinator.session.prepared_verdicts import PreparedVerdicts, waits_for_verdict
from outrider_coordinator.session.state import DRAFTING, SessionState, SessionStatus
from outrider_coordinator.session.table import Ints, SessionTable


def prepare(table: SessionTable, index: Ints) -> PreparedProposals | PreparedScores | None:
    """Prepared answers that these rows wait for, if they wait for the same kind and all are usual."""
    rows = table.values.take(index, axis=0)
    if rows.item(0, col.STATUS) == DRAFTING:
        return PreparedProposals(table, index, rows) if waits_for_proposal(rows).all() else None
    if rows.item(0, col.NUM_DRAFTED):
        return PreparedVerdicts(table, index, rows) if waits_for_verdict(rows).all() else None
    return PreparedTokens(table, index, rows) if waits_for_token(rows).all() else None


def proposals_for(
    table: SessionTable, indices: Sequence[int], answers: AnswerBatch[Any]
) -> Iterator[tuple[Ints, PreparedProposals]]:
    """Expected proposals: their places among the answers. ``indices``: of their rows; -1 for unknown sessions."""
    index, rows, fits = _answered(table, indices, answers, col.DRAFT_ASKED)
    counts = answers.counts
    fits &= waits_for_proposal(rows)
    fits &= (counts > 0) & (counts <= rows[:, col.DRAFT_LENGTH])
    fits &= (rows[:, col.FLAGS] & col.IS_SPARSE != 0) == answers.is_sparse
    fits &= _highest(answers) < rows[:, col.LIMIT]
    places = np.flatnonzero(fits)
    if places.size:
        yield places, PreparedProposals(table, index[places], rows[places])


def scores_for(
    table: SessionTable, indices: Sequence[int], answers: AnswerBatch[Any]
) -> Iterator[tuple[Ints, PreparedScores]]:
    """Expected scores: their places among the answers, of drafted and of plain steps."""
    index, rows, fits = _answered(table, indices, answers, col.TARGET_ASKED)
    flags = rows[:, col.FLAGS]
    fits &= rows[:, col.NUM_DRAFTED] + 1 == answers.counts
    fits &= (flags & col.IS_SPARSE != 0) == (answers.outside_masses is not None)
    drafted = fits & waits_for_verdict(rows) & ((flags & col.READS_STATES != 0) == (answers.states is not None))
    for is_own, kind in ((drafted, PreparedVerdicts), (fits & waits_for_token(rows), PreparedTokens)):
        places = np.flatnonzero(is_own)
        if places.size:
            yield places, kind(table, index[places], rows[places])


def claims_for(
    table: SessionTable, indices: Sequence[int], answers: AnswerBatch[Any]
) -> Iterator[tuple[Ints, PreparedScores]]:
    """Scores of sessions whose target has begun the next step by itself: their places among the answers."""
    if answers.goes_on is None:
        return
    index, rows, fits = _answered(table, indices, answers, col.TARGET_ASKED)
    fits &= answers.goes_on != 0
    fits &= waits_for_claimed(rows, answers.counts.astype(np.int64) - 1)
    places = np.flatnonzero(fits)
    if places.size:
        yield places, PreparedClaims(table, index[places], rows[places])


def end_wait(session: SessionState) -> None:
    """End of a session's wait for a proposal, once the command that follows has left."""
    side = session.draft
    if side.reads_states:
        side.states.move_to(max(0, side.held - 1))


def end_step(session: SessionState, step: StepEnded, states: HiddenStates | None, *, is_drafting: bool) -> StepEnded:
    """End of a step for its session, once the command of the next has left; the step, up to the stop text that ends the
    output, if one does. A ``Prepare``, or the end, may be among the session's actions.

    ``states``: those that came with the scores. ``is_drafting``: the next step waits for a proposal.
    """
    count, finish = session.output.push_counted(step.token_ids, step.logprobs)
    if finish is not None:
        session.tokens.cut(len(step.token_ids) - count)
        logprobs = None if step.logprobs is None else step.logprobs[:count]
        step = step._replace(token_ids=step.token_ids[:count], logprobs=logprobs)
    length = step.base_length + step.num_accepted
    if states is not None and session.draft.wants_states:
        session.draft.states.put(states, length)
    lag = drafting.draft_lag(session, length)
    session.policy.note_verdict(session.speculation, step.num_draft_tokens, step.num_accepted, draft_lag=lag)
    if finish is not None:
        session.status = SessionStatus.SCORING  # no wait for a proposal has begun
        steps.end(session, finish)
    elif not is_drafting and not session.target.claims:
        session.no_draft_reason = drafting.why_not_asked(session)
        steps.renew_lookahead(session)
    return step


def are_announced(table: SessionTable, sessions: Column, generations: Column) -> Bools:  # [B], [B] -> [B]
    """True where a session waits for the proposal that scores of this generation are of."""
    index = np.array(table.indices(sessions.tolist()), dtype=np.int64)
    own = table.values.take(index, axis=0, mode="clip")
    found: Bools = own[:, col.ANNOUNCED] == generations.astype(np.int64)
    found &= own[:, col.STATUS] == DRAFTING
    found &= index >= 0
    return found


def _answered(
    table: SessionTable, indices: Sequence[int], answers: AnswerBatch[Any], asked: int
) -> tuple[Ints, Ints, Bools]:
    """The rows of the answers, and which of these answer what was asked last."""
    index = np.array(indices, dtype=np.int64)
    rows = table.values.take(index, axis=0, mode="clip")
    fits: Bools = rows[:, asked] == answers.generations.astype(np.int64)
    fits &= rows[:, col.LENGTH] == answers.base_lengths.astype(np.int64)
    fits &= index >= 0
    return index, rows, fits


def _highest(answers: AnswerBatch[Any]) -> Ints:
    """Highest token of each answer; -1 for one without any."""
    counts = answers.counts
    found = np.full(counts.size, -1, dtype=np.int64)
    has_tokens = np.flatnonzero(counts)
    if has_tokens.size:
        starts = counts.cumsum() - counts
        ids = answers.token_ids.astype(U4, copy=False)
        found[has_tokens] = np.maximum.reduceat(ids, starts[has_tokens].astype(np.intp))
    return found
