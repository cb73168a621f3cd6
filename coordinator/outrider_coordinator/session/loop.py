"""The speculation loop of one session, as a state machine: events in, actions out.

It never waits, reads no clock and knows no link and no other session: time comes in as events, so that every order of
events can be tried without a network. This is the list of the events; the transitions are in ``steps``,
``draft_events`` and ``target_events``. One step::

    Extend -> Proposal -> Score -> Scores -> verdict -> StepEnded
"""

from __future__ import annotations

from outrider.errors import DeadlineError, LostTooOftenError, OutriderError
from outrider.ports import DraftEvent, ItemTiming, Proposal, Scores, TargetEvent
from outrider.types import FinishReason
from outrider_coordinator.session import draft_events, steps, target_events
from outrider_coordinator.session.actions import Action, Fail, Finish
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.readiness import MAX_LOSSES_ALONE, MAX_LOSSES_IN_A_ROW, Readiness
from outrider_coordinator.session.state import SessionState, SessionStatus
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft


class SessionLoop(SessionState):
    """The events of one session; ``take_actions`` returns the resulting actions."""

    def take_actions(self) -> list[Action]:
        """Return the actions since the last call, in order."""
        actions, self.actions = self.actions, []
        return actions

    # Events of the driver.

    def start(self, session: int) -> None:
        """The session is admitted, for the first time or again, with a number never used on these links."""
        self.table.enter(self, session)
        if self.resumed_ending is None:
            steps.begin(self)
        else:
            steps.end(self, self.resumed_ending)

    def cancel(self) -> None:
        """The caller cancelled the call or disconnected."""
        if not self.is_over:
            self.output.close()
            steps.end(self, Finish(FinishReason.CANCELLED))

    def expire(self) -> None:
        """The caller's deadline has passed."""
        self.fail(DeadlineError("the request's time is up"))

    def fail(self, error: OutriderError) -> None:
        """The request failed."""
        if not self.is_over:
            steps.end(self, Fail(error))

    def pause(self) -> None:
        """The reader is behind: no step begins until ``resume``. A step under way goes on to its end."""
        self.is_paused = True

    def resume(self) -> None:
        """The reader reads on."""
        self.is_paused = False
        if self.status is SessionStatus.PAUSED:
            steps.begin(self)

    def release(self) -> None:
        """Give up the pages on both services, and a step under way; ``start`` rebuilds the session."""
        if self.is_running:
            steps.release(self)

    def draft_timed_out(self, step: int) -> None:
        """The draft timed out in this step."""
        if (self.status is SessionStatus.DRAFTING or self.target.is_held_back) and step == self.step:
            draft_events.on_timeout(self)

    def draft_lost(self) -> None:
        """The link of the draft has ended, and with it the draft's state."""
        if self.draft.readiness is not Readiness.GONE:
            draft_events.go_without(self, Readiness.AWAY, WithoutDraft.AWAY)

    def draft_back(self, facts: DraftFacts) -> None:
        """A draft is available again, or may have room again."""
        if self.draft.readiness is Readiness.AWAY:
            self.draft.facts = facts
            self.draft.losses = 0
            self.draft.reset(Readiness.CLOSED)

    def target_lost(self) -> None:
        """The link of the target has ended, and with it the target's state.

        A session that waited for an answer may be the cause, so it is not sent forever to targets that break over it.
        """
        side = self.target
        side.losses += side.asked is not None
        side.lose(Readiness.AWAY)
        if side.losses > MAX_LOSSES_IN_A_ROW + MAX_LOSSES_ALONE:
            self.fail(LostTooOftenError(f"the target was lost {side.losses} times over this request"))

    def target_back(self) -> None:
        """A target is available; the session is rebuilt from the committed tokens."""
        if self.target.readiness is Readiness.AWAY:
            self.target.reset(Readiness.CLOSED)
            if self.status is SessionStatus.SCORING:
                steps.score(self)

    # Events of the services.

    def on_draft_event(self, event: DraftEvent, timing: ItemTiming | None = None) -> None:
        """An event of this session on the draft's link."""
        if not self.is_running:
            return
        if isinstance(event, Proposal):
            draft_events.on_proposal(self, event, timing)
        else:
            draft_events.on_other(self, event)

    def on_target_event(self, event: TargetEvent, timing: ItemTiming | None = None) -> None:
        """An event of this session on the target's link."""
        if not self.is_running:
            return
        if isinstance(event, Scores):
            target_events.on_scores(self, event, timing)
        else:
            target_events.on_other(self, event)
