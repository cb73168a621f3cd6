"""Ends of steps of many sessions: output, statistics, timers, logprobs and traces, once the next commands have left.

A stop text is found here: the session is released, and the answer to what was asked of it meanwhile is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.columns import ExtendColumns
from outrider.ports import ItemTiming
from outrider.types import HiddenStates, TokenLogprob
from outrider_coordinator.acceptance import NextToken, Verdict
from outrider_coordinator.requests.draft_waits import DraftWaits
from outrider_coordinator.requests.request_state import EndedWait, RequestState
from outrider_coordinator.requests.taken_answers import TakenAnswers
from outrider_coordinator.session.actions import StepEnded
from outrider_coordinator.session.logprobs import emitted_logprobs
from outrider_coordinator.session.prepared import TakenScores
from outrider_coordinator.session.state import SessionState, reason_of
from outrider_coordinator.session.transitions import JudgedStep, end_step, end_wait
from outrider_coordinator.stats.spec_decode_stats import StepCount, WithoutDraft


class StepEnds:
    """Ends of the steps of one coordinator's sessions."""

    def __init__(
        self,
        draft_waits: DraftWaits,
        *,
        act_on: Callable[[RequestState], object],
        fail: Callable[[RequestState, Exception], None],
    ) -> None:
        """``act_on`` does what a request's session asks for; ``fail`` ends a request with an error."""
        self._draft_waits, self._act_on, self._fail = draft_waits, act_on, fail

    def end_waits(self, one: TakenAnswers) -> None:
        """The wait of each session for its proposal."""
        if one.batch.draft is not None:
            self._draft_waits.note_response(one.batch.draft, one.requests)
        for place, (request, timing) in enumerate(zip(one.requests, one.timings, strict=True)):
            end_wait(request.loop)
            request.clear_draft_timer()
            request.note_end(EndedWait(timing, one.arrived, one.handled, False, None))
            if request.trace.notes is not None:
                one.trace(place, timing)

    def end_steps(self, one: TakenAnswers, taken: TakenScores) -> None:
        """The step of each session."""
        states = one.answers.states_at(taken.places)
        for place, (request, judged) in enumerate(zip(one.requests, one.steps(), strict=True)):
            try:
                self._end_step(request, one, place, judged, states[place])
            except Exception as error:
                self._fail(request, error)

    def _end_step(
        self, request: RequestState, one: TakenAnswers, place: int, judged: JudgedStep, states: HiddenStates | None
    ) -> None:
        """The end of one session's step, whose next command has left."""
        session, is_drafting = request.loop, isinstance(one.taken.commands, ExtendColumns)
        num_logprobs, logprobs = session.engine_request.num_logprobs, None
        if num_logprobs is not None:
            logprobs = emitted_logprobs(one.events[place], judged.token_ids, num_logprobs)
        step = end_step(session, judged, states, logprobs, is_drafting=is_drafting)
        logprobs = None if logprobs is None else logprobs[: len(step.token_ids)]
        timing, reason = one.timings[place], reason_of(step.reason)
        count = StepCount(step.num_drafted, step.num_accepted, len(step.token_ids), reason)
        request.note_end(EndedWait(timing, one.arrived, one.handled, False, count))
        request.put_output(step.token_ids, logprobs, one.handled)
        if request.trace.notes is not None:
            one.trace(place, timing, _ended(session, step, reason, logprobs, timing))
        if is_drafting and not session.is_over:
            self._draft_waits.begin(request, session.step)
        if session.actions:  # a ``Prepare``, or what follows from the end
            self._act_on(request)


def _ended(
    session: SessionState,
    step: JudgedStep,
    reason: WithoutDraft,
    logprobs: tuple[TokenLogprob, ...] | None,
    timing: ItemTiming | None,
) -> StepEnded:
    """The step as traces show it."""
    base, num_drafted, num_accepted, token_ids, _ = step
    source = NextToken.BONUS if num_accepted == num_drafted else NextToken.RECOVERED
    verdict, number = Verdict(num_accepted, token_ids[-1], source), session.step - 1
    return StepEnded(number, base, num_drafted, verdict, tuple(token_ids), logprobs, reason, timing, is_prefill=False)
