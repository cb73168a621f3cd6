"""Transitions of many sessions at once: from proposals to what targets score, and from scores to what is asked next.

``prepare`` computes what follows from the next answers to some rows of a ``SessionTable`` while services compute;
``answered`` does so for answers that are there. Each works for any number of sessions from 1 on. Answers that are out
of the ordinary, and rows in a state that is, are left to the transitions of one session on the same rows
(``draft_events``, ``target_events``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from outrider.batched import AnswerBatch, Column
from outrider.types import HiddenStates
from outrider_coordinator.session import drafting, steps
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.actions import StepEnded
from outrider_coordinator.session.prepared import Bools, Prepared
from outrider_coordinator.session.prepared_claims import PreparedClaims
from outrider_coordinator.session.prepared_proposals import PreparedProposals, waits_for_proposal
from outrider_coordinator.session.prepared_tokens import PreparedTokens, waits_for_token
from outrider_coordinator.session.prepared_verdicts import PreparedVerdicts, waits_for_verdict
from outrider_coordinator.session.state import DRAFTING, SessionState, SessionStatus
from outrider_coordinator.session.table import Ints, SessionTable

PROPOSALS = (PreparedProposals,)
SCORES = (PreparedClaims, PreparedVerdicts, PreparedTokens)
"""Kinds of prepared answers of each service."""


def prepare(table: SessionTable, index: Ints) -> Prepared | None:
    """Prepared answers that these rows wait for, if they wait for the same kind and all are usual."""
    rows = table.values.take(index, axis=0)
    if rows.item(0, col.STATUS) == DRAFTING:
        return PreparedProposals(table, index, rows) if waits_for_proposal(rows).all() else None
    if rows.item(0, col.NUM_DRAFTED):
        return PreparedVerdicts(table, index, rows) if waits_for_verdict(rows).all() else None
    return PreparedTokens(table, index, rows) if waits_for_token(rows).all() else None


def answered(
    table: SessionTable, indices: Sequence[int], answers: AnswerBatch[Any], kinds: Sequence[type[Prepared]]
) -> Iterator[tuple[Ints, Any]]:
    """Prepared answers, by kind, that the answers fit, with their indices; the others are out of the ordinary.

    ``indices``: of their rows; -1 for unknown sessions.
    """
    index = np.array(indices, dtype=np.int64)
    rows = table.values.take(index, axis=0, mode="clip")
    is_text = (rows[:, col.LENGTH] == answers.base_lengths.astype(np.int64)) & (index >= 0)
    generations, num_left = answers.generations.astype(np.int64), len(index)
    for kind in kinds:
        selected = np.flatnonzero(is_text & (rows[:, kind.asked] == generations) & kind.fit(rows, answers))
        if selected.size:
            yield selected, kind(table, index[selected], rows[selected])
        if not (num_left := num_left - selected.size):
            return


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
    lag = drafting.num_uncomputed(session, length)
    session.policy.note_verdict(session.speculation, step.num_draft_tokens, step.num_accepted, num_uncomputed=lag)
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
