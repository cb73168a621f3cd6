"""Action carrier: carries out what sessions ask for, by their services and their requests' lifecycles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.ports import Score, TargetCommand
from outrider.telemetry.logs import records_about
from outrider_coordinator.requests.draft_waits import DraftWaits
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.routing.peers import Peers
from outrider_coordinator.session import actions
from outrider_coordinator.stats.request_timings import RequestTimings

if TYPE_CHECKING:
    from outrider_coordinator.requests.driver import Driver


class ActionCarrier:
    """Actions of one coordinator's sessions."""

    def __init__(
        self,
        lifecycle: Driver,
        draft_waits: DraftWaits,
        peers: Peers,
    ) -> None:
        self._lifecycle, self._draft_waits, self._peers = lifecycle, draft_waits, peers

    def carry_out(self, request: RequestState, arrived: float) -> float:
        """Do what the session asks for since ``arrived`` was read; when it had been decided."""
        handled = RequestTimings.now()
        for action in request.loop.take_actions():
            self._act(request, action, arrived, handled)
        return handled

    def _act(self, request: RequestState, action: actions.Action, arrived: float, handled: float) -> None:
        if request.trace.notes is not None:
            request.note_in_trace(action)
        match action:
            case actions.StepEnded():
                request.note(action, arrived, handled)
            case actions.ToTarget():
                self._send_to_target(request, action.command)
            case actions.ToDraft():
                if request.place.draft is not None:
                    request.place.draft.send(action.command)
            case actions.DraftWaitBegan():
                self._draft_waits.begin(request, action.step)
            case actions.DraftWaitEnded():
                self._draft_waits.end(request)
                request.note(action, arrived, handled)
            case _:
                with records_about(request.log_fields):
                    self._act_on_request(request, action)

    def _send_to_target(self, request: RequestState, command: TargetCommand) -> None:
        target = request.place.target
        if target is None:
            return
        if isinstance(command, Score) and command.hidden_states_from is not None:
            # How the states go to the draft of now.
            command = replace(command, plane=self._peers.plane(target, request.place.draft))
        target.send(command)

    def _act_on_request(
        self, request: RequestState, action: actions.RetryDraftAfter | actions.Park | actions.Finish | actions.Fail
    ) -> None:
        match action:
            case actions.RetryDraftAfter():
                self._lifecycle.retry_draft(request, action.retry_after_ms)
            case actions.Park():
                self._lifecycle.park(request, action.retry_after_ms)
            case actions.Finish() | actions.Fail():
                self._draft_waits.end(request)
                self._lifecycle.end(request, action)
