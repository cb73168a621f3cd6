"""Ends of steps of many sessions: output, statistics, timers, logprobs and traces, once the next commands have left.

A stop text is found here: the session is released, and the answer to what was asked of it meanwhile is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.batched import ExtendBatch
from outrider.types import HiddenStates
from outrider_coordinator.requests.draft_waits import DraftWaits
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.requests.taken_answers import TakenAnswers
from outrider_coordinator.session.actions import DraftWaitEnded, StepEnded
from outrider_coordinator.session.transitions import end_step, end_wait


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
            self._draft_waits.end(request)
            request.note(DraftWaitEnded(timing), one.arrived, one.handled)
            if request.trace.notes is not None:
                one.trace(place, timing)

    def end_steps(self, one: TakenAnswers) -> None:
        """The step of each session."""
        states = one.answers.states_at(one.taken.indices)
        for place, (request, step) in enumerate(zip(one.requests, one.steps(), strict=True)):
            try:
                asks = request.loop.engine_request.num_logprobs is not None
                ended = step._replace(logprobs=one.logprobs(place, step.token_ids)) if asks else step
                self._end_step(request, one, place, ended, states[place])
            except Exception as error:
                self._fail(request, error)

    def _end_step(
        self, request: RequestState, one: TakenAnswers, place: int, step: StepEnded, states: HiddenStates | None
    ) -> None:
        """The end of one session's step, whose next command has left."""
        session, is_drafting = request.loop, isinstance(one.taken.commands, ExtendBatch)
        step = end_step(session, step, states, is_drafting=is_drafting)
        request.note(step, one.arrived, one.handled)
        if request.trace.notes is not None:
            one.trace(place, step.timing, step)
        if is_drafting and not session.is_over:
            self._draft_waits.begin(request, session.step)
        if session.actions:  # a ``Prepare``, or what follows from the end
            self._act_on(request)
