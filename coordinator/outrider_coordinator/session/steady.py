"""Steady steps: what nearly every answer leads to in a session that goes on, decided with few calls.

A service waits for the commands of all its sessions, so what a session does between an answer and its next command
counts as many times as there are sessions. Each function here is a short form of one transition of ``target_events``,
``draft_events`` and ``steps``: it does just what that does, or, wherever anything is out of the ordinary, nothing, and
returns None for the transition itself to be taken. Those define what a step means; ``tests/coordinator/session`` holds
both forms against each other.
"""

from __future__ import annotations

from outrider.ports import Extend, ItemTiming, Proposal, Score
from outrider.types import HiddenStates
from outrider_coordinator.acceptance import Verdict
from outrider_coordinator.session import steps
from outrider_coordinator.session.actions import StepEnded
from outrider_coordinator.session.service_state import NOTHING_DRAFTED, Asked, Drafted, Readiness
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.speculation import LONGEST_INLINE_FEED
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft


def take_proposal(session: SessionState, event: Proposal, ahead: int | None = None) -> Score | None:
    """``draft_events.on_proposal`` for one without fault that this step waits for: what its target is asked.

    ``ahead``: the generation of the ``ScoreAhead`` by which it was asked for that before; None: it was not.
    """
    draft, target = session.draft, session.target
    asked = draft.asked
    if (
        asked is None
        or event.generation != asked.generation
        or session.status is not SessionStatus.DRAFTING
        or event.base_length != asked.length
        or not event.token_ids
        or not asked.draft_length
        or target.readiness is not Readiness.OPEN
        or (ahead is not None and ahead + 1 != session.commands.next_generation)
    ):
        return None
    first = None
    if draft.reads_states:
        if not (steps.hands_over_states(session) and session.policy.is_to_draft(session.speculation)):
            return None
        first = session.tokens.length - 1
    draft.note_answer(asked, event.base_length)
    evidence = event.evidence if session.engine_request.rules.evidence_form is not None else None
    session.proposal = Drafted(event.token_ids, evidence, draft.opened)
    session.status = SessionStatus.SCORING
    command = session.commands.score(target, session.proposal, first, generation=ahead)
    target.asked = command.generation
    target.note_score(is_plain=False)
    return command


def take_verdict(
    session: SessionState,
    generation: int,
    verdict: Verdict,
    timing: ItemTiming | None,
    *,
    length: int | None = None,
    states: HiddenStates | None = None,
) -> tuple[StepEnded, Extend | Score | None] | None:
    """``target_events.on_scores`` where the generation goes on: the step that ends, and the command of the next one.

    Without a command the next step has begun by ``steps.begin``, whose actions are the session's; with one, a
    ``Prepare`` may be among these, to follow it. ``generation``: of the scores. ``length``: the draft length, where it
    was chosen before; 0: a plain step. ``states``: those that came with the scores, where the length was chosen.
    """
    draft, target, output, tokens = session.draft, session.target, session.output, session.tokens
    if generation != target.asked or not session.is_plain_request:
        return None
    if length is None and steps.is_to_follow(session):
        return None
    proposal, num_accepted, base = session.proposal, verdict.num_accepted, tokens.length
    new = (*proposal.token_ids[:num_accepted], verdict.next_token_id)
    if not output.add_within(new):
        return None
    if states is not None and draft.wants_states:
        draft.states.put(states, base + num_accepted)
    reason, is_prefill = session.no_draft_reason, session.is_prefill
    target.note_answer(base + num_accepted)
    draft.settle(proposal, num_accepted)
    num_drafted, lag = len(proposal.token_ids), steps.draft_lag(session, base + num_accepted)
    session.policy.note_verdict(session.speculation, num_drafted, num_accepted, draft_lag=lag)
    tokens.extend(new)
    ended = StepEnded(session.step, base, num_drafted, verdict, new, None, reason, timing, is_prefill)
    command = _begin(session, length)
    if command is None:
        steps.begin(session)
    return ended, command


def take_plain(session: SessionState, asked: int, token_id: int, generation: int) -> WithoutDraft | None:
    """``take_verdict`` on a plain step where another plain one follows, whose ``Score`` was sent with ``generation``:
    why the step that ends had no proposal. Only a ``Prepare`` may be among the session's actions.

    ``asked``: the generation of the scores. ``token_id``: what they bring.
    """
    target, commands, base = session.target, session.commands, session.tokens.length
    if (
        asked != target.asked
        or session.proposal.token_ids
        or session.is_paused
        or not session.is_plain_request
        or target.readiness is not Readiness.OPEN
        or generation != commands.next_generation
        or not session.output.add_within((token_id,))
    ):
        return None
    reason = session.no_draft_reason
    target.note_answer(base)
    session.policy.note_verdict(session.speculation, 0, 0, draft_lag=session.draft.lag(base))
    session.tokens.extend((token_id,))
    session.step += 1
    session.proposal, session.no_draft_reason = NOTHING_DRAFTED, steps.why_not_asked(session)
    commands.skip_generation()
    target.asked = generation
    target.note_score(is_plain=True)
    steps.renew_lookahead(session)
    return reason


def _begin(session: SessionState, length: int | None) -> Extend | Score | None:
    """``steps.begin`` where one command to an open service is all; None, with nothing changed, where it is not."""
    draft, target, policy = session.draft, session.target, session.policy
    if session.is_paused:
        return None
    is_chosen = length is not None
    if length is None:
        length = policy.length(session.speculation)
    if length:
        num_tokens = session.tokens.length
        length = draft.room_after(num_tokens, min(length, session.output.num_remaining - 1))
        is_fed = not policy.is_controlled or num_tokens - draft.held <= LONGEST_INLINE_FEED
        if not length or not is_fed or draft.asked is not None or draft.readiness is not Readiness.OPEN:
            return None
        if draft.lacks_states(num_tokens):
            return None
        return _ask_draft(session, length)
    if target.readiness is not Readiness.OPEN:
        return None
    is_plain = is_chosen or not policy.is_catching_up(session.speculation)
    return _ask_target(session) if is_plain else None


def _ask_draft(session: SessionState, length: int) -> Extend:
    session.step += 1
    session.proposal, session.no_draft_reason = NOTHING_DRAFTED, WithoutDraft.NOTHING_PROPOSED
    session.status = SessionStatus.DRAFTING
    build = session.commands.extend_with_states if session.draft.reads_states else session.commands.extend
    command = build(session.draft, length)
    session.draft.asked = Asked(command.generation, session.tokens.length, length)
    return command


def _ask_target(session: SessionState) -> Score:
    session.step += 1
    session.proposal, session.no_draft_reason = NOTHING_DRAFTED, steps.why_not_asked(session)
    target = session.target
    command = session.commands.score(target, NOTHING_DRAFTED)
    target.asked = command.generation
    target.note_score(is_plain=True)
    steps.renew_lookahead(session)
    return command
