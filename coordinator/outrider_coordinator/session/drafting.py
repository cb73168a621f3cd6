"""Drafting of one session: tokens that its next step asks the draft for, what the draft lacks, why it is not asked.

Queries of the session's state; they change nothing.
"""

from __future__ import annotations

from outrider_coordinator.session.state import SessionState
from outrider_coordinator.speculation import LONGEST_INLINE_FEED, LONGEST_PROMPT_AT_ONCE
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft


def draft_length(session: SessionState) -> int:
    """Tokens to ask for in this step: 0 when the draft is not to be asked at all."""
    wanted = session.policy.length(session.speculation)
    return room_for(session, wanted, session.tokens.length, session.output.num_remaining - 1) if wanted else 0


def will_draft(session: SessionState) -> bool:
    """True if the step after a prefill, which brings one token, will ask the draft."""
    will_draft = session.policy.will_draft(session.speculation, session.tokens.length)
    return will_draft and _has_room_after_prefill(session)


def is_soon_to_draft(session: SessionState) -> bool:
    """True if steps soon after a prefill will ask the draft: once others' prompts are computed, and it has the text."""
    return session.policy.is_to_draft(session.speculation) and _has_room_after_prefill(session)


def _has_room_after_prefill(session: SessionState) -> bool:
    """True if a token can be drafted after the one that a prefill brings."""
    return room_for(session, 1, session.tokens.length + 1, session.output.num_remaining - 2) > 0


def room_for(session: SessionState, wanted: int, length: int, useful: int) -> int:
    """Number of the ``wanted`` tokens that can be drafted after ``length`` committed ones; at most ``useful``."""
    side = session.draft
    return side.room_after(length, min(wanted, useful)) if wanted and side.is_usable else 0


def is_fed(session: SessionState) -> bool:
    """True if to wait for a proposal. Where lengths are controlled, steps go on without one until the draft has the
    text.
    """
    if session.draft.lacks_states(session.tokens.length):
        return False
    if not session.policy.is_controlled:
        return True
    length = session.tokens.length
    is_short = session.draft.asked is None and length - session.draft.held <= LONGEST_INLINE_FEED
    return is_short or waits_for_prompt(session, length)


def num_uncomputed(session: SessionState, length: int) -> int:
    """Draft tokens to prefill when a step ends with ``length`` committed tokens, but for a prompt that the next step
    waits for.
    """
    return 0 if waits_for_prompt(session, length + 1) else session.draft.num_uncomputed(length)


def waits_for_prompt(session: SessionState, length: int) -> bool:
    """True if the step after the prefill, with ``length`` committed tokens, waits until the draft has the prompt.

    On one device both models' prompts take as long together as one after the other, and the target's comes first then.
    Only for the sole session, since others would wait for its prompt too.
    """
    side, num_prompt_tokens = session.draft, len(session.engine_request.prompt_token_ids)
    if side.held or side.asked is not None or side.reads_states or not side.facts.shares_device:
        return False
    if length != num_prompt_tokens + 1 or session.policy.num_together(session.speculation) != 1:
        return False
    has_capacity = room_for(session, 1, length, session.engine_request.max_tokens - 2) > 0
    return has_capacity and session.policy.will_draft(session.speculation, num_prompt_tokens)


def is_held_back(session: SessionState) -> bool:
    """True if the text that the draft lacks would take much of the time of a device that the target computes on too."""
    side = session.draft
    return side.facts.shares_device and session.tokens.length - side.held > LONGEST_PROMPT_AT_ONCE


def needs_prefill_of_draft(session: SessionState) -> bool:
    """True if the draft lacks more text than a step can bring, and is to have it before any session drafts."""
    if not session.policy.is_prefilling_drafts(session.speculation):
        return False
    length = session.tokens.length
    has_capacity = room_for(session, 1, length, session.output.num_remaining - 1) > 0
    return has_capacity and length - session.draft.held > LONGEST_INLINE_FEED


def why_not_asked(session: SessionState) -> WithoutDraft:
    """Reason why ``_draft_length`` is 0."""
    why = session.policy.no_draft_reason(session.speculation)
    if why is not None:
        return why
    if session.output.num_remaining <= 1:
        return WithoutDraft.LAST_TOKEN
    side = session.draft
    if not side.is_usable:
        return WithoutDraft.LATE if side.is_late else side.why_away
    return WithoutDraft.OUTGROWN
