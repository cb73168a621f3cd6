"""Steps of a session: how each begins, what it asks the services, and how the session ends or is parked.

::

    WAITING -> begin -> SCORING                          prefill, or a plain step
                     -> DRAFTING -> score -> SCORING     a step with a proposal
                     -> SCORING                         a step with the tokens that a grammar forces
    SCORING -> begin                                     after a verdict
            -> PAUSED                                    the reader is behind
            -> park -> WAITING                           the target has no room
            -> end -> FINISHED

At most one command is unanswered on each side. A command always brings what its side lacks, so a rebuild, a late reply
and the bonus-token hole need no case of their own.
"""

from __future__ import annotations

from outrider.ports import ItemTiming
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.actions import DraftWaitBegan, DraftWaitEnded, Fail, Finish, Park, ToDraft, ToTarget
from outrider_coordinator.session.draft_side import NOTHING_DRAFTED, Asked
from outrider_coordinator.session.drafting import (
    draft_length,
    is_fed,
    is_held_back,
    is_soon_to_draft,
    needs_prefill_of_draft,
    waits_for_prompt,
    why_not_asked,
    will_draft,
)
from outrider_coordinator.session.forced_tokens import forced_proposal, least_forced
from outrider_coordinator.session.readiness import Readiness
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.session.state_feed import is_feed_due, is_to_follow, note_states, part_length, wants_states
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft

LOOKAHEAD_STEPS = 64
"""Plain steps that one ``Prepare`` lets a target compute before they are asked for. The target stops by itself where
the session ends."""
LEAST_LOOKAHEAD_STEPS = 16
"""Steps left below which the next ``Prepare`` goes out, so that a target never runs out of them between two messages.
"""
MAX_SILENT_STEPS = 6
"""Steps in a row that a target begins by itself without draft tokens. Then its draft is asked: it may have lost the
session, or be slower than the target."""
UNCLAIMED = col.IS_SPARSE | col.READS_STATES | col.HAS_GRAMMAR
"""Flags of a row whose steps are never claimed."""
_PASSING = frozenset((WithoutDraft.NOTHING_PROPOSED, WithoutDraft.BAD_EVIDENCE))
"""Reasons after which the next step may have a proposal."""
_PLAIN_STEPS_IN_A_ROW = 2
"""Plain steps in a row after which more are likely to follow, after those reasons too."""
_SOON_TO_DRAFT = frozenset((WithoutDraft.DRAFT_PREFILL, WithoutDraft.PROMPTS))
"""Reasons that are over after a few steps where texts are short."""
_PLAIN_STEPS_UNTIL_DRAFTS = 8
"""Plain steps in a row after which more are likely to follow those reasons. Where drafts begin before, what a target
computed ahead for a single session holds up all others for one or two forwards, and puts it out of step with them. A
session that waits for the prompts of its own burst, and has not drafted, is ahead together with the others."""


def begin(session: SessionState, *, goes_on: bool = False, num_pushed: int = 0) -> None:
    """Begin the next step: as a prefill, plain, or with a proposal. A paused session begins none. ``goes_on``: the
    target has begun it by itself, after one with ``num_pushed`` draft tokens.
    """
    if session.is_paused:
        session.status = SessionStatus.PAUSED
        return
    session.step += 1
    session.proposal = NOTHING_DRAFTED
    session.no_draft_reason = WithoutDraft.NOTHING_PROPOSED
    if session.target.held == 0:
        _begin_prefill(session)
        return
    length = draft_length(session)
    session.target.claims = session.speculation.is_ahead = goes_on and may_claim(session, num_pushed)
    if session.target.claims:
        score(session)
        return
    forced = forced_proposal(session)
    if len(forced.token_ids) >= least_forced(session, length):
        session.proposal, session.no_draft_reason = forced, WithoutDraft.FORCED
        feed_states(session)
        score(session)
    elif length and is_fed(session):
        _begin_drafting(session, length)
    else:
        _begin_plain(session, length)


def may_claim(session: SessionState, num_pushed: int) -> bool:
    """True if a step that the target has begun by itself may be asked for: its draft goes on with as many tokens as
    are wanted.
    """
    if session.row.values.item(col.FLAGS) & UNCLAIMED or session.target.num_plain_steps >= MAX_SILENT_STEPS:
        return False
    wanted = session.policy.length(session.speculation)
    return wanted > 0 and num_pushed in (0, wanted)


def _begin_prefill(session: SessionState) -> None:
    """The prompt, or the whole text of a session to be rebuilt, goes to both sides at the same time. A long one, and
    that of the only session, goes to a draft on the target's device after the first token, which would come later
    otherwise.
    """
    session.no_draft_reason = WithoutDraft.PREFILL
    if session.draft.reads_states:
        _begin_prefill_with_states(session)
        return
    is_late = is_held_back(session) or waits_for_prompt(session, session.tokens.length + 1)
    if will_draft(session) and session.draft.asked is None and not is_late:
        ask_draft(session, 0)
    score(session)


def _begin_prefill_with_states(session: SessionState) -> None:
    """A draft that reads hidden states says first how much it holds: the target computes them from there."""
    side = session.draft
    if side.has_answered or not is_to_follow(session):
        score(session)
        return
    session.status = SessionStatus.DRAFTING
    session.actions.append(DraftWaitBegan(session.step))
    if side.asked is None:
        ask_draft(session, 0)


def feed_states(session: SessionState) -> None:
    """Bring a draft the hidden states that have come for it, if it is time to, or ask how much it holds; no step waits
    for that.
    """
    side = session.draft
    if not side.reads_states or side.asked is not None:
        return
    if is_feed_due(session):
        ask_draft(session, 0)


def _begin_plain(session: SessionState, wanted: int) -> None:
    """Begin a step without a proposal; a draft that lacks text is sent it for later steps."""
    if session.draft.reads_states:
        feed_states(session)
        if session.target.held:  # otherwise it is a prefill
            session.no_draft_reason = WithoutDraft.DRAFT_PREFILL if wanted else why_not_asked(session)
    elif wanted or needs_prefill_of_draft(session):
        session.no_draft_reason = WithoutDraft.DRAFT_PREFILL
        if session.draft.asked is None:
            ask_draft(session, 0)
    else:
        session.no_draft_reason = why_not_asked(session)
    score(session)


def _begin_drafting(session: SessionState, length: int) -> None:
    session.status = SessionStatus.DRAFTING
    session.actions.append(DraftWaitBegan(session.step))
    if session.draft.asked is None:  # otherwise its prefill is not done yet
        # A prompt counts as no step, for which other sessions on the device would wait.
        is_alone = is_held_back(session) or waits_for_prompt(session, session.tokens.length)
        ask_draft(session, 0 if is_alone else length)


def ask_draft_or_score(session: SessionState) -> None:
    """Ask the draft of a waiting step, which has its text now or has lost it, or go on without."""
    length = draft_length(session)
    if length and is_fed(session):
        ask_draft(session, length)
    else:
        _begin_plain(session, length)


def ask_draft(session: SessionState, length: int) -> None:
    """Bring the draft what it lacks, and ask for a proposal of ``length`` tokens, possibly none."""
    side, actions = session.draft, session.actions
    if side.readiness is Readiness.CLOSED:
        session.spec_stats.num_draft_rebuilds += side.is_lost
        opening = session.commands.open_draft(side)
        side.note_opened(opening.generation)
        actions.append(ToDraft(opening))
    command = session.commands.extend(side, length)
    held = command.num_kept_tokens + len(command.token_ids)
    side.asked = Asked(command.generation, held, command.draft_length)
    actions.append(ToDraft(command))


def score(session: SessionState, timing: ItemTiming | None = None) -> None:
    """Bring the target what it lacks and the proposal of this step; ``timing``: of the draft's answer to it.

    A target that is away gets it when it is back.
    """
    end_draft_wait(session, timing)
    session.status = SessionStatus.SCORING
    side, actions = session.target, session.actions
    if side.readiness is Readiness.AWAY:
        return
    is_fed_states = wants_states(session)
    layers = session.draft.facts.hidden_state_layers
    if is_fed_states and side.readiness is Readiness.OPEN and side.hidden_state_layers != layers:
        side.reset(Readiness.CLOSED)  # it was opened for another draft
    if side.readiness is Readiness.CLOSED:
        session.spec_stats.num_target_rebuilds += side.is_lost
        has_prompt_logprobs = session.prompt_logprobs is not None
        opening = session.commands.open_target(has_prompt_logprobs=has_prompt_logprobs, hidden_state_layers=layers)
        side.note_opened(opening.generation)
        side.hidden_state_layers = layers
        actions.append(ToTarget(opening))
    first = session.draft.states.end if is_fed_states else None
    part = None if first is None else part_length(session, first)
    command = session.commands.score(side, session.proposal, first, part)
    side.asked, side.part = command.generation, part
    note_states(session, None if first is None else part or session.tokens.length)
    side.is_held_back = False
    actions.append(ToTarget(command))
    if part is not None:
        return
    side.note_score(is_plain=not session.proposal.token_ids)
    renew_lookahead(session)


def renew_lookahead(session: SessionState) -> None:
    """Let the target compute plain steps ahead of the one that was asked for, if more are expected and few are left."""
    side = session.target
    if side.lookahead_credit < LEAST_LOOKAHEAD_STEPS and _goes_on_plain(session):
        side.lookahead_credit = LOOKAHEAD_STEPS
        session.actions.append(ToTarget(session.commands.prepare(LOOKAHEAD_STEPS)))


def score_next_part(session: SessionState) -> None:
    """A part of a long text is scored. The next is, once the draft has taken enough of the hidden states; a draft that
    takes none within its time is not waited for, and the rest is scored without.
    """
    feed_states(session)
    if session.draft.wants_states and session.draft.states.is_full and session.draft.asked is not None:
        session.target.is_held_back = True
        session.actions.append(DraftWaitBegan(session.step))
    else:
        score(session)


def go_on(session: SessionState) -> None:
    """The draft has taken states, or is not waited for any more: score the part that was held back, if one was."""
    if session.status is SessionStatus.SCORING and session.target.is_held_back:
        session.target.is_held_back = False
        session.actions.append(DraftWaitEnded(None, session.is_prefill))
        score_next_part(session)


def _goes_on_plain(session: SessionState) -> bool:
    """True if the steps after this one are expected to have no proposal either."""
    if session.proposal.token_ids or session.resumed_finish is not None or session.output.num_remaining <= 1:
        return False
    if session.target.claims:
        return False
    if is_to_follow(session):
        return False  # steps that are computed ahead hand over no states
    reason, num_plain = session.no_draft_reason, session.target.num_plain_steps
    if reason is WithoutDraft.PREFILL:
        return not is_soon_to_draft(session)
    if reason in _SOON_TO_DRAFT:
        is_of_burst = reason is WithoutDraft.PROMPTS and not session.speculation.has_ever_drafted
        return is_of_burst or num_plain >= _PLAIN_STEPS_UNTIL_DRAFTS
    return reason not in _PASSING or num_plain >= _PLAIN_STEPS_IN_A_ROW


def end_draft_wait(session: SessionState, timing: ItemTiming | None = None) -> None:
    """End the wait for the proposal, if there is one."""
    if session.status is SessionStatus.DRAFTING:
        session.actions.append(DraftWaitEnded(timing, session.is_prefill))


def end(session: SessionState, ending: Finish | Fail) -> None:
    """Finish or fail the session, and release it on both services."""
    _leave(session)
    session.status = SessionStatus.FINISHED
    session.actions.append(ending)


def park(session: SessionState, retry_after_ms: int) -> None:
    """Leave both services until the target has room."""
    release(session)
    session.actions.append(Park(retry_after_ms))


def release(session: SessionState) -> None:
    """Leave both services until the session is started again."""
    _leave(session)
    session.status = SessionStatus.WAITING


def _leave(session: SessionState) -> None:
    end_draft_wait(session)
    if session.draft.readiness is Readiness.OPEN:
        session.actions.append(ToDraft(session.commands.release()))
        session.draft.reset(Readiness.CLOSED)
    if session.target.readiness is Readiness.OPEN:
        session.actions.append(ToTarget(session.commands.release()))
    session.target.reset(Readiness.CLOSED)  # one that is away too: the next may be another
