"""Events of the target: scores with their verdict, and events that prevent them."""

from __future__ import annotations

from outrider import errors
from outrider.errors import ConfigError, InvalidRequestError, LostTooOftenError, OutriderError, ProtocolError
from outrider.ports import (
    HiddenStateChunk,
    ItemTiming,
    Opened,
    Preempted,
    Refused,
    Scores,
    SessionFailed,
    SessionLost,
    TargetEvent,
)
from outrider.types import TokenLogprob
from outrider_coordinator.acceptance import Verdict, judge_one
from outrider_coordinator.session import drafting, steps
from outrider_coordinator.session.actions import Fail, StepEnded
from outrider_coordinator.session.draft_side import Drafted
from outrider_coordinator.session.logprobs import emitted_logprobs, prompt_logprobs
from outrider_coordinator.session.readiness import MAX_LOSSES_IN_A_ROW, Readiness
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft


def on_scores(session: SessionState, event: Scores, timing: ItemTiming | None = None) -> None:
    """Judge the scores, commit what the verdict keeps, and begin the next step or end."""
    if event.generation != session.target.asked:
        session.spec_stats.num_stale_target_replies += 1
        if event.generation == session.target.announced:
            session.target.announced = 0  # they were scored without their proposal: they are asked for again with it
        return
    if session.target.claims:
        _take_pushed(session, event)
    if _is_of_others(session, event):
        _score_again(session)
        return
    if session.target.part is not None:
        _on_part(session, event)
        return
    try:
        verdict = judge(session, event)
    except OutriderError as error:
        if event.draft_token_ids:
            _score_again(session)
        else:
            steps.end(session, Fail(error))
        return
    new = (*session.proposal.token_ids[: verdict.num_accepted], verdict.next_token_id)
    try:
        logprobs = _take_logprobs(session, event, new)
    except ProtocolError as error:
        steps.end(session, Fail(error))
        return
    if session.resumed_finish is not None:
        session.tokens.extend(session.unscored_token_ids)
        steps.end(session, session.resumed_finish)
    else:
        if event.hidden_states is not None and session.draft.wants_states:
            # Of the positions whose tokens are kept; the last new token has none yet.
            session.draft.states.put(event.hidden_states, session.tokens.length + verdict.num_accepted)
        _commit(session, verdict, new, logprobs, timing, goes_on=event.goes_on)


def _take_pushed(session: SessionState, event: Scores) -> None:
    """The proposal of a step that the target has begun by itself is what had been pushed to it."""
    side = session.draft
    if not event.draft_token_ids:
        return
    session.target.num_plain_steps = 0
    session.proposal = Drafted(event.draft_token_ids, None, side.opened)
    if side.readiness is Readiness.OPEN:
        side.held = session.tokens.length


def _score_again(session: SessionState) -> None:
    """Scores of the text that came here, if another one came to the target directly."""
    session.spec_stats.num_bad_evidence += 1
    steps.score(session)


def _is_of_others(session: SessionState, event: Scores) -> bool:
    """True if other draft tokens were scored than the draft has proposed here."""
    return bool(event.draft_token_ids) and event.draft_token_ids != session.proposal.token_ids


def _on_part(session: SessionState, event: Scores) -> None:
    """A part of a long text is computed, for its hidden states; what follows it is known."""
    if event.base_length != session.target.part:
        steps.end(
            session, Fail(ProtocolError(f"scores build on {event.base_length} tokens, not on the part asked for"))
        )
        return
    session.target.note_answer(event.base_length)
    if event.hidden_states is not None and session.draft.wants_states:
        session.draft.states.put(event.hidden_states, event.base_length)
    steps.score_next_part(session)


def judge(session: SessionState, event: Scores) -> Verdict:
    """The verdict on the proposal of the step; ``ProtocolError`` if the scores do not answer it."""
    base, proposal, engine_request = session.tokens.length, session.proposal, session.engine_request
    if event.base_length != base:
        raise ProtocolError(f"scores build on {event.base_length} tokens, not on {base}")
    return judge_one(
        engine_request.rules,
        proposal.token_ids,
        proposal.evidence,
        event.form,
        seed=engine_request.seed,
        base=base,
    )


def _take_logprobs(session: SessionState, event: Scores, new: tuple[int, ...]) -> tuple[TokenLogprob, ...] | None:
    engine_request = session.engine_request
    if engine_request.num_prompt_logprobs is not None and session.prompt_logprobs is None:
        session.prompt_logprobs = prompt_logprobs(event, engine_request.prompt_token_ids)
    return None if engine_request.num_logprobs is None else emitted_logprobs(event.logprobs, new)


def _commit(
    session: SessionState,
    verdict: Verdict,
    new: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...] | None,
    timing: ItemTiming | None,
    *,
    goes_on: bool,
) -> None:
    """Both sides hold what was accepted; the token after it is new to them."""
    base, proposal, num_accepted = session.tokens.length, session.proposal, verdict.num_accepted
    reason, is_prefill = session.no_draft_reason, session.is_prefill
    session.target.note_answer(base + num_accepted)
    session.draft.note_verdict(proposal, num_accepted)
    num_proposed, lag = len(proposal.token_ids), drafting.num_uncomputed(session, base + num_accepted)
    # What the grammar forces says nothing of the draft.
    num_forced = num_proposed if reason is WithoutDraft.FORCED else 0
    num_drafted = num_proposed - num_forced
    num_good = num_accepted if num_drafted else 0
    session.policy.note_verdict(session.speculation, num_drafted, num_good, num_uncomputed=lag)
    num_emitted, finish = session.output.push(new, logprobs)
    if finish is not None:
        new, logprobs = new[:num_emitted], None if logprobs is None else logprobs[:num_emitted]
    session.tokens.extend(new)
    session.actions.append(
        StepEnded(session.step, base, num_drafted, num_accepted, new, reason, timing, logprobs, is_prefill, num_forced)
    )
    if finish is None:
        steps.begin(session, goes_on=goes_on, num_pushed=num_proposed)
    else:
        steps.end(session, finish)


def on_other(session: SessionState, event: TargetEvent) -> None:
    """Any other event of the target."""
    if isinstance(event, Opened):
        _on_opened(session, event)
    elif isinstance(event, HiddenStateChunk):
        _on_states(session, event)
    elif (
        event.generation < session.target.opened
        or session.target.readiness is not Readiness.OPEN
        or is_stale_loss(session, event)
    ):
        session.spec_stats.num_stale_target_replies += 1
        session.target.announced = 0  # it may be what it refused to score: the proposal is sent to it again
    elif isinstance(event, SessionLost):
        _on_session_lost(session, event)
    elif isinstance(event, SessionFailed):
        steps.end(session, Fail(_named_error(event)))
    elif isinstance(event, Refused):
        session.target.reset(Readiness.CLOSED)
        steps.park(session, event.retry_after_ms)
    elif isinstance(event, Preempted):
        session.target.lose(Readiness.CLOSED)
        steps.park(session, event.retry_after_ms)


def is_stale_loss(session: SessionState, event: TargetEvent) -> bool:
    """True if the loss is of what was asked for before, or ahead of proposals; what is asked for next says it again, if
    it is so.
    """
    return isinstance(event, SessionLost) and event.generation != session.target.asked


def _named_error(event: SessionFailed) -> OutriderError:
    """The error of ``outrider.errors`` that the event names; ``ProtocolError`` for an unknown name."""
    found = getattr(errors, event.code, None)
    if not (isinstance(found, type) and issubclass(found, OutriderError)):
        return ProtocolError(f"a session failed with the unknown code {event.code!r}: {event.message}")
    if issubclass(found, InvalidRequestError | ConfigError):
        # Its message already begins with the field.
        return found(event.field, event.message.removeprefix(f"{event.field}: "))
    return found(event.message)


def _on_states(session: SessionState, event: HiddenStateChunk) -> None:
    """States of a part of what is being scored: committed text, whatever the verdict."""
    if event.generation == session.target.asked and session.draft.wants_states:
        session.draft.states.put(event.states, session.tokens.length - 1)
        steps.feed_states(session)


def _on_opened(session: SessionState, event: Opened) -> None:
    """Opening of a session at a target; cached tokens of the first one count, as a rebuilt one finds its own work."""
    if event.generation == session.target.opened and session.num_cached_prompt_tokens is None:
        session.num_cached_prompt_tokens = min(event.num_cached_tokens, len(session.engine_request.prompt_token_ids))


def _on_session_lost(session: SessionState, event: SessionLost) -> None:
    side = session.target
    session.spec_stats.num_target_losses += 1
    side.losses += 1
    if side.losses > MAX_LOSSES_IN_A_ROW:
        # Released there too: a target keeps a session that it loses over its text.
        steps.end(session, Fail(LostTooOftenError(f"the target lost the session {side.losses} times: {event.reason}")))
        return
    side.lose(Readiness.CLOSED)
    if session.status is SessionStatus.SCORING:
        steps.score(session)
