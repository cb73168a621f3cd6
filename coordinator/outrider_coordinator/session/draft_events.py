"""Events of the draft: proposals, and reasons for their absence. No event of a draft can end a session."""

from __future__ import annotations

from outrider.ports import DraftEvent, ItemTiming, Opened, Preempted, Proposal, Refused, SessionFailed, SessionLost
from outrider_coordinator.acceptance import is_sound_proposal
from outrider_coordinator.session import steps
from outrider_coordinator.session.actions import RetryDraftAfter, ToDraft
from outrider_coordinator.session.draft_side import Drafted
from outrider_coordinator.session.readiness import MAX_LOSSES_IN_A_ROW, Readiness
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.session.state_feed import note_states
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft

LOST_DRAFT_RETRY_MS = 1000
"""Pause before a lost session is opened again; meanwhile the target decodes alone."""


def on_proposal(session: SessionState, event: Proposal, timing: ItemTiming | None = None) -> None:
    """Take a proposal to the target; one that cannot be judged costs speed and never a wrong token."""
    side = session.draft
    asked = side.asked
    if asked is None or event.generation != asked.generation:
        session.spec_stats.num_stale_draft_replies += 1
        return
    if side.wants_states and event.base_length != asked.length:
        _on_session_lost(session)  # it was brought all states that it needs, and does not hold the text
        return
    side.note_answer(asked, event.base_length)
    if asked.draft_length == 0:
        session.policy.note_text_taken(session.speculation, num_uncomputed=side.num_uncomputed(session.tokens.length))
        note_states(session)
    steps.go_on(session)
    if session.status is not SessionStatus.DRAFTING:
        return  # a prefill, or too late for its step
    if asked.draft_length == 0:
        steps.ask_draft_or_score(session)
        return
    if event.base_length != asked.length or not _may_be_judged(session, event, asked.draft_length):
        session.spec_stats.num_bad_evidence += 1
        session.no_draft_reason = WithoutDraft.BAD_EVIDENCE
    elif event.token_ids:
        evidence = event.evidence if session.engine_request.rules.rule.needs_evidence else None
        session.proposal = Drafted(event.token_ids, evidence, side.opened)
    steps.score(session, timing)


def _may_be_judged(session: SessionState, event: Proposal, draft_length: int) -> bool:
    rules = session.engine_request.rules
    return is_sound_proposal(
        event.token_ids,
        event.evidence,
        needs_evidence=rules.rule.needs_evidence,
        asked=draft_length,
        num_token_ids=rules.num_token_ids,
    )


def on_other(session: SessionState, event: DraftEvent) -> None:
    """Any other event of the draft."""
    if isinstance(event, Opened):
        return  # how much of the text a draft had cached makes no difference
    if event.generation < session.draft.opened or session.draft.readiness is not Readiness.OPEN:
        session.spec_stats.num_stale_draft_replies += 1
    elif isinstance(event, SessionLost):
        _on_session_lost(session)
    elif isinstance(event, SessionFailed):
        go_without(session, Readiness.GONE, WithoutDraft.FAILED)
    elif isinstance(event, Refused | Preempted):
        session.actions.append(RetryDraftAfter(event.retry_after_ms))
        go_without(session, Readiness.AWAY, WithoutDraft.REFUSED)


def _on_session_lost(session: SessionState) -> None:
    side = session.draft
    session.spec_stats.num_draft_losses += 1
    side.losses += 1
    if side.losses > MAX_LOSSES_IN_A_ROW:
        _release(session)
        session.actions.append(RetryDraftAfter(LOST_DRAFT_RETRY_MS))
        go_without(session, Readiness.AWAY, WithoutDraft.LOST)
        return
    side.lose(Readiness.CLOSED)
    if session.status is SessionStatus.DRAFTING:
        steps.ask_draft_or_score(session)
    steps.go_on(session)
    if side.readiness is not Readiness.OPEN:
        _release(session)


def _release(session: SessionState) -> None:
    """End a lost session at the draft, which keeps one whose states or text alone were not there."""
    session.actions.append(ToDraft(session.commands.release()))


def on_timeout(session: SessionState) -> None:
    """The draft timed out: this step continues without it, and the draft is used again when it answers."""
    session.spec_stats.num_draft_timeouts += 1
    session.no_draft_reason = WithoutDraft.LATE
    session.draft.is_late = True
    session.target.is_held_back = False
    steps.score(session)


def go_without(session: SessionState, readiness: Readiness, why: WithoutDraft) -> None:
    """The session cannot use the draft, for a while or permanently."""
    session.draft.lose(readiness, why)
    if session.status is SessionStatus.DRAFTING:
        session.no_draft_reason = why
        steps.score(session)
    steps.go_on(session)
