"""Draft length policy, shared by the sessions of a coordinator.

Knows requests' own bounds, the load and the switch by load, and which controller a session belongs to: one for each
target. Refuses to know tokens: a length may depend on anything known before a token is drawn and never on that token,
or throwing drafts away would bias the output.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial

from outrider.limits import MAX_DRAFT_LENGTH
from outrider.ports import DraftEvent, EventBatch, ForwardReport
from outrider.types import StepCost
from outrider_coordinator.speculation.controller import DraftLengthController
from outrider_coordinator.speculation.explanation import log_fields, reason_of
from outrider_coordinator.speculation.order import Order
from outrider_coordinator.speculation.sessions import ControlledSession
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft

_log = logging.getLogger(__name__)


class DraftLengthPolicy:
    """Draft lengths by request, by load and, where it is controlled, by expected throughput.

    ``num_speculative_tokens`` of the server and of a request is the length itself, or with ``is_controlled`` the most
    that a controller may choose. With ``disable_by_batch_size`` n above 0 nothing is drafted while n or more requests
    run or wait; drafting is on again as soon as fewer do. Without a draft nothing is wanted at all.
    """

    def __init__(
        self,
        default_length: int,
        *,
        disable_by_batch_size: int = 0,
        has_draft: bool = True,
        is_controlled: bool = False,
    ) -> None:
        self.is_controlled = is_controlled and has_draft
        self._default_length = default_length
        self._limit = MAX_DRAFT_LENGTH if has_draft else 0
        self._disable_by_batch_size = disable_by_batch_size
        self.num_requests = 0
        """Running and waiting requests."""
        self.controllers: dict[object, DraftLengthController] = {}
        """Controllers by target; none where lengths are fixed."""
        self._fixed: set[ControlledSession] = set()
        """Sessions on a target without a controller, each with its limit as length."""
        self.take_order: Callable[[object, bool], None] | None = None
        """Has a target and its drafts work ahead (True) or in turn; None: there is no choice."""
        self._orders: dict[object, Order] = {}

    @property
    def is_always_off(self) -> bool:
        """True if a single request is load enough to keep every session from drafting."""
        return self._disable_by_batch_size == 1

    @property
    def is_off_by_load(self) -> bool:
        """True if the load keeps every session from drafting."""
        return 0 < self._disable_by_batch_size <= self.num_requests

    # Sessions.

    def session(
        self,
        requested: int | None,
        *,
        reads_states: bool = False,
        max_tokens: int = sys.maxsize,
        num_prompt_tokens: int = 0,
    ) -> ControlledSession:
        """State of the policy for a session; ``requested`` is the request's own bound, ``reads_states`` says whether
        its draft reads hidden states of the target, ``max_tokens`` are those that may come.
        """
        limit = min(self._default_length if requested is None else requested, self._limit)
        return ControlledSession(
            limit, reads_states=reads_states, max_tokens=max_tokens, num_prompt_tokens=num_prompt_tokens
        )

    def enter(
        self,
        session: ControlledSession,
        target: object,
        *,
        target_costs: Sequence[StepCost] = (),
        draft_costs: Sequence[StepCost] = (),
    ) -> None:
        """A session is placed on this target; the costs are those that the services measured."""
        self.leave(session)
        self._enter_order(session, target)
        if not self.is_controlled:
            self._fixed.add(session)
        else:
            if target not in self.controllers:
                self.controllers[target] = DraftLengthController()
            session.controller = controller = self.controllers[target]
            controller.costs.provide(target_costs, draft_costs)
            controller.enter(session)

    def leave(self, session: ControlledSession) -> None:
        """The session leaves the target."""
        if session.order is not None:
            session.order.leave()
        self._fixed.discard(session)
        if session.controller is not None:
            session.controller.leave(session)
        session.order = session.controller = None

    def remove_target(self, target: object) -> None:
        """The target is lost: when it is back, it may be another process."""
        self.controllers.pop(target, None)
        self._orders.pop(target, None)

    def _enter_order(self, session: ControlledSession, target: object) -> None:
        if self.take_order is None or not session.limit:
            return
        if target not in self._orders:
            self._orders[target] = Order(partial(self.take_order, target))
        session.order = self._orders[target]
        session.order.enter()

    def note_verdict(
        self, session: ControlledSession, num_drafted: int, num_accepted: int, *, num_uncomputed: int
    ) -> None:
        """A step of the session was judged; ``num_uncomputed``: committed tokens that its draft lacks.

        It is learned from once the commands of the message have left, unless it ends a prompt: others wait for that.
        """
        if session.order is not None:
            session.order.note(num_accepted + 1)
        if session.controller is not None:
            session.controller.add_verdict((session, num_drafted, num_accepted, num_uncomputed))

    def note_text_taken(self, session: ControlledSession, *, num_uncomputed: int) -> None:
        """The session's draft has taken in text, and lacks ``num_uncomputed`` committed tokens now."""
        if session.controller is not None:
            session.controller.note_text_taken(session, num_uncomputed)

    def length(self, session: ControlledSession) -> int:
        """The draft length of a session's next step, before it is trimmed to what fits."""
        return self.lengths((session,))[0]

    def lengths(self, sessions: Sequence[ControlledSession]) -> list[int]:
        """``length`` of each session; all live on one target."""
        if self.is_off_by_load:
            return [0] * len(sessions)
        controller = sessions[0].controller if sessions else None
        return [session.limit for session in sessions] if controller is None else controller.lengths(sessions)

    def are_plain(self, sessions: Sequence[ControlledSession]) -> list[bool]:
        """True if each session's next step is plain, and its draft computes no text meanwhile; all live on one
        target.
        """
        controller = sessions[0].controller if sessions else None
        if self.is_off_by_load or controller is None:
            return [not length for length in self.lengths(sessions)]
        return controller.are_plain(sessions)

    def will_draft(self, session: ControlledSession, num_tokens: int) -> bool:
        """True if it drafts as soon as its prompt of ``num_tokens`` was taken in, so that its draft needs that too."""
        if self.is_off_by_load or not session.limit:
            return False
        if not self.is_controlled:
            return True
        return session.controller is not None and session.controller.will_draft(num_tokens)

    def num_together(self, session: ControlledSession) -> int:
        """Sessions that live on its target; with fixed lengths, on any target."""
        return len(self._fixed) if session.controller is None else len(session.controller.sessions)

    def num_states(self, session: ControlledSession) -> int:
        """Positions whose hidden states are on their way to the drafts of the other sessions of its target."""
        sessions = self._fixed if session.controller is None else session.controller.sessions
        return sum(other.num_states for other in sessions) - session.num_states

    def is_to_draft(self, session: ControlledSession) -> bool:
        """True if the session drafts, or will once its draft has the text: until then nothing is to follow for it."""
        if self.is_off_by_load or not session.limit:
            return False
        return session.controller is None or session.controller.is_to_draft(session)

    def is_prefilling_drafts(self, session: ControlledSession) -> bool:
        """True if the session's draft is to compute its text, for later steps."""
        controller = session.controller
        return controller is not None and not self.is_off_by_load and controller.is_prefilling_drafts(session)

    def no_draft_reason(self, session: ControlledSession) -> WithoutDraft | None:
        """The reason why ``length`` is 0; None if it is not."""
        if session.limit == 0:
            return WithoutDraft.NOT_ASKED
        if self.is_off_by_load:
            return WithoutDraft.LOAD
        controller = session.controller
        if controller is None:
            return None
        if not session.length:
            return WithoutDraft.NOT_WORTH
        if controller.length(session):
            return None
        if controller.sessions.has_prompts:
            return WithoutDraft.PROMPTS
        return WithoutDraft.DRAFT_PREFILL if controller.is_prefilling_drafts(session) else WithoutDraft.NOT_WORTH

    # Messages of services.

    def begin(self, target: object, now: float) -> None:
        """A message of the target has come; verdicts follow, then ``end``."""
        controller = self.controllers.get(target)
        if controller is not None:
            controller.begin(now)

    def end(self, target: object, report: ForwardReport | None) -> bool:
        """The message was processed; returns True if there is anything to learn and to ``choose``."""
        controller = self.controllers.get(target)
        if controller is None:
            return False
        controller.add_end(report)
        return True

    def note_proposals(self, target: object, batch: EventBatch[DraftEvent]) -> None:
        """A message of a draft has come, for sessions of the target."""
        controller = self.controllers.get(target)
        if controller is not None:
            controller.note_proposals(batch)

    # Controllers.

    def choose(self, target: object) -> None:
        """Let the target's controller learn from the last message, and choose anew if it is time to; once the commands
        that follow from the message were sent.
        """
        controller = self.controllers.get(target)
        if controller is None:
            return
        controller.learn()
        if controller.choose():
            fields = log_fields(target, controller) | {"reason": reason_of(controller)}
            _log.info("decoding is %s from now on", controller.mode, extra={"fields": fields})
        if controller.has_just_chosen and _log.isEnabledFor(logging.DEBUG):
            _log.debug("draft lengths were chosen", extra={"fields": log_fields(target, controller)})

    @property
    def mean_length(self) -> float:
        """Mean draft length over the sessions that run; without any, the length that the next one would begin with."""
        if self.is_off_by_load or not self._limit:
            return 0.0
        if self._fixed:
            return sum(session.limit for session in self._fixed) / len(self._fixed)
        running = [each.sessions for each in self.controllers.values() if each.sessions]
        if not running:
            return self._first_length
        return sum(each.mean_length * len(each) for each in running) / sum(map(len, running))

    @property
    def _first_length(self) -> float:
        """Draft length with which the next session begins, the mean over the targets that are known."""
        most = float(min(self._default_length, self._limit))
        if not self.is_controlled:
            return most
        firsts = [controller.first_length for controller in self.controllers.values()]
        return min(most, sum(firsts) / len(firsts)) if firsts else most
