"""One request over all three services in one thread, step by step: what each does is timed by itself.

The state machine, the ticket and the services' cores are the real ones; only the models are stand-ins that take no
time, and there is neither a wire nor an event loop. What is left is what a step costs in Python, so that a microsecond
more or less can be seen.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from benchmarks.step.stand_in import MAX_MODEL_LEN, VOCAB_SIZE, Answer, StandInJob, StandInStage, propose, score
from coordinator.acceptance import JudgeRules
from coordinator.actions import Fail, Finish, ToDraft, ToTarget
from coordinator.loop import SessionLoop
from coordinator.plan import Plan
from coordinator.sides import DraftFacts
from coordinator.speculation import DraftLengthPolicy
from coordinator.ticket import Ticket
from coordinator.tracing import RequestTraces
from draft_service.texts import PlainText, PlainTexts
from outrider.engine.core import ServiceCore
from outrider.engine.ledger import Ledger, Limits
from outrider.engine.stage import Pass
from outrider.errors import IntegrityError
from outrider.generation import GenerationRequest
from outrider.ports import (
    Branches,
    DraftCommand,
    EventBatch,
    Extend,
    ItemTiming,
    Proposal,
    Score,
    Scores,
    TargetCommand,
)
from outrider.recording import Recorder
from outrider.telemetry.tracing import Tracing
from outrider.types import AcceptanceMethod, SamplingParams

DRAFT_LENGTH = 4
ACCEPTANCE = 0.75
_PROMPT = (11, 7, 5, 3)
_LINK, _SESSION = 1, 1

ItemT = TypeVar("ItemT", Extend, Score)
EventT = TypeVar("EventT", bound=Proposal | Branches | Scores)


DraftCore = ServiceCore[PlainText, Extend, StandInJob[Extend], Proposal | Branches]
TargetCore = ServiceCore[PlainText, Score, StandInJob[Score], Scores]


class _AtOnce(StandInStage[ItemT, EventT]):
    """Answers without any wait."""

    def __init__(self, answer: Answer[ItemT, EventT]) -> None:
        self._answer = answer

    def advance(self, shares: Sequence[tuple[StandInJob[ItemT], int]]) -> Pass[EventT]:
        """All, now."""
        return Pass([self._answer(job) for job, _ in shares], computed_ns=time.perf_counter_ns())


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that one step took in each process."""

    coordinator: float
    target: float
    draft: float


@dataclass(frozen=True, slots=True)
class Tracings:
    """Where the spans of each process go; None: it does not trace."""

    coordinator: Tracing | None = None
    target: Recorder | None = None
    draft: Recorder | None = None


class Rig:
    """One request under way. ``caller`` is its caller's ``traceparent``."""

    def __init__(self, tracings: Tracings, *, caller: str, num_steps: int) -> None:
        plan = _plan(num_steps * (DRAFT_LENGTH + 1))
        traces = RequestTraces(tracings.coordinator, max_steps=num_steps)
        loop = SessionLoop(plan, DraftLengthPolicy(DRAFT_LENGTH), draft=DraftFacts())
        request = GenerationRequest(prompt_token_ids=plan.prompt_token_ids, trace_parent=caller)
        self.ticket = Ticket(loop, trace=traces.begin(request))
        self._target: TargetCore = ServiceCore(_ledger(), _AtOnce(lambda job: score(job, ACCEPTANCE)))
        self._draft: DraftCore = ServiceCore(_ledger(), _AtOnce(lambda job: propose(job, ACCEPTANCE)))
        self._target.recorder, self._draft.recorder = tracings.target, tracings.draft
        self._to_target: list[TargetCommand] = []
        self._to_draft: list[DraftCommand] = []
        self._start()

    def step(self) -> StepCost:
        """One step, from the draft's forward to the verdict."""
        times = [time.perf_counter()]
        proposed = _serve(self._draft, self._to_draft)
        times.append(time.perf_counter())
        self._tell(proposed, is_draft=True)
        times.append(time.perf_counter())
        scored = _serve(self._target, self._to_target)
        times.append(time.perf_counter())
        self._tell(scored, is_draft=False)
        times.append(time.perf_counter())
        draft, proposal, target, verdict = (after - before for before, after in itertools.pairwise(times))
        return StepCost(proposal + verdict, target, draft)

    def end(self) -> None:
        """The request is over: what was noted of it is handed over."""
        self.ticket.loop.cancel()
        for action in self.ticket.loop.take_actions():
            if isinstance(action, Finish):
                self.ticket.trace.ended(self.ticket.loop, action)

    def _start(self) -> None:
        """Admission and the prefill, which are not timed."""
        if self.ticket.trace.notes is not None:
            self.ticket.trace.notes.taken_in("stand-in")
        self.ticket.admit()
        self._deliver(partial(self.ticket.loop.start, _SESSION), None)
        self._tell(_serve(self._draft, self._to_draft), is_draft=True)
        self._tell(_serve(self._target, self._to_target), is_draft=False)

    def _tell(self, batches: Sequence[EventBatch[Any]], *, is_draft: bool) -> None:
        """As ``coordinator.driver`` does."""
        ticket = self.ticket
        for batch in batches:
            for event, timing in batch.timed():
                if ticket.trace.notes is not None:
                    ticket.trace.notes.answered(event, timing, is_draft=is_draft)
                on_event = ticket.loop.on_draft_event if is_draft else ticket.loop.on_target_event
                self._deliver(partial(on_event, event), timing)

    def _deliver(self, event: Callable[[], None], timing: ItemTiming | None) -> None:
        self.ticket.deliver(event, timing)
        for action in self.ticket.loop.take_actions():
            if isinstance(action, ToDraft):
                self.ticket.note_sent(action.command)
                self._to_draft.append(action.command)
            elif isinstance(action, ToTarget):
                self.ticket.note_sent(action.command)
                self._to_target.append(action.command)
            elif isinstance(action, Fail | Finish):
                raise IntegrityError(f"the request ended while it was timed: {action}")


def _serve(core: DraftCore | TargetCore, commands: list[Any]) -> list[EventBatch[Any]]:
    """One message to a service, and all that it answers."""
    core.handle(_LINK, commands)
    commands.clear()
    answers = core.step()
    return [batch for _, batch in answers]


def _ledger() -> Ledger[PlainText]:
    return Ledger(PlainTexts(), Limits(VOCAB_SIZE, MAX_MODEL_LEN, trims=False))


def _plan(max_tokens: int) -> Plan:
    rules = JudgeRules.of(AcceptanceMethod.REJECTION, temperature=0, dense=False, num_token_ids=VOCAB_SIZE)
    return Plan(
        prompt_token_ids=_PROMPT,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0),
        seed=1,
        acceptance_method=AcceptanceMethod.REJECTION,
        rules=rules,
        num_token_ids=VOCAB_SIZE,
    )
