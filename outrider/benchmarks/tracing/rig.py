"""One request over all three services in one thread, step by step: what each does is timed by itself.

The state machine, the request and the services' cores are the real ones; only the models are stand-ins that take no
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

from outrider.benchmarks.step.stand_in import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Answer,
    StandInExecutor,
    StandInJob,
    propose,
    score,
)
from outrider.errors import IntegrityError
from outrider.generation import GenerationRequest
from outrider.ports import (
    DraftCommand,
    EventBatch,
    Extend,
    Proposal,
    Score,
    Scores,
    TargetCommand,
)
from outrider.recording import Recorder
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import ExecutorOutput
from outrider.serving.session import Limits
from outrider.serving.session_registry import SessionRegistry
from outrider.telemetry.tracing import Tracing
from outrider.types import AcceptanceMethod, JudgingRule, SamplingParams
from outrider_coordinator.acceptance import JudgeRules
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.session.actions import DraftWaitEnded, Fail, Finish, StepEnded, ToDraft, ToTarget
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.tracing import RequestTraces
from outrider_draft.texts import PlainSequence, PlainSequences

DRAFT_LENGTH = 4
ACCEPTANCE = 0.75
_PROMPT = (11, 7, 5, 3)
_LINK, _SESSION = 1, 1

ItemT = TypeVar("ItemT", Extend, Score)
EventT = TypeVar("EventT", bound=Proposal | Scores)


DraftCore = EngineCore[PlainSequence, Extend, StandInJob[Extend], Proposal]
TargetCore = EngineCore[PlainSequence, Score, StandInJob[Score], Scores]


class _AtOnce(StandInExecutor[ItemT, EventT]):
    """Answers without any wait."""

    def __init__(self, answer: Answer[ItemT, EventT]) -> None:
        self._answer = answer

    def execute(self, batch: Sequence[tuple[StandInJob[ItemT], int]]) -> ExecutorOutput[EventT]:
        """All, now."""
        return ExecutorOutput([self._answer(job) for job, _ in batch], computed_ns=time.perf_counter_ns())


@dataclass(frozen=True, slots=True)
class TracedStepTimes:
    """Seconds that one step took in each process."""

    coordinator: float
    target: float
    draft: float


@dataclass(frozen=True, slots=True)
class Tracings:
    """Destination of the spans of each process; None without tracing."""

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
        self.request_state = RequestState(loop, trace=traces.begin(request))
        self._target: TargetCore = EngineCore(_session_registry(), _AtOnce(lambda job: score(job, ACCEPTANCE)))
        self._draft: DraftCore = EngineCore(_session_registry(), _AtOnce(lambda job: propose(job, ACCEPTANCE)))
        self._target.recorder, self._draft.recorder = tracings.target, tracings.draft
        self._to_target: list[TargetCommand] = []
        self._to_draft: list[DraftCommand] = []
        self._start()

    def step(self) -> TracedStepTimes:
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
        return TracedStepTimes(proposal + verdict, target, draft)

    def end(self) -> None:
        """The request is over: what was noted of it is handed over."""
        self.request_state.loop.cancel()
        for action in self.request_state.loop.take_actions():
            if isinstance(action, Finish):
                self.request_state.trace.ended(self.request_state.loop, action)

    def _start(self) -> None:
        """Admission and the prefill, which are not timed."""
        if self.request_state.trace.notes is not None:
            self.request_state.trace.notes.taken_in("stand-in")
        self.request_state.admit()
        self._deliver(partial(self.request_state.loop.start, _SESSION))
        self._tell(_serve(self._draft, self._to_draft), is_draft=True)
        self._tell(_serve(self._target, self._to_target), is_draft=False)

    def _tell(self, batches: Sequence[EventBatch[Any]], *, is_draft: bool) -> None:
        """Send as ``outrider_coordinator.requests.session_driver`` does."""
        request_state = self.request_state
        for batch in batches:
            for event, timing in batch.timed():
                if request_state.trace.notes is not None:
                    request_state.trace.notes.answered(event, timing, is_draft=is_draft)
                if is_draft:
                    self._deliver(partial(request_state.loop.on_draft_event, event, timing=timing))
                else:
                    self._deliver(partial(request_state.loop.on_target_event, event, timing=timing))

    def _deliver(self, event: Callable[[], None]) -> None:
        request_state, arrived = self.request_state, time.perf_counter()
        event()
        handled = time.perf_counter()
        for action in request_state.loop.take_actions():
            request_state.note_in_trace(action)
            if isinstance(action, ToDraft):
                self._to_draft.append(action.command)
            elif isinstance(action, ToTarget):
                self._to_target.append(action.command)
            elif isinstance(action, StepEnded | DraftWaitEnded):
                request_state.note(action, arrived, handled)
            elif isinstance(action, Fail | Finish):
                raise IntegrityError(f"the request ended while it was timed: {action}")
        request_state.flush()


def _serve(core: DraftCore | TargetCore, commands: list[Any]) -> list[EventBatch[Any]]:
    """One message to a service, and all that it answers."""
    core.handle(_LINK, commands)
    commands.clear()
    answers = core.step()
    core.post_step()
    return [batch for _, batch in answers]


def _session_registry() -> SessionRegistry[PlainSequence]:
    return SessionRegistry(PlainSequences(), Limits(VOCAB_SIZE, MAX_MODEL_LEN, trims=False))


def _plan(max_tokens: int) -> EngineRequest:
    rules = JudgeRules(JudgingRule.GREEDY, VOCAB_SIZE)
    return EngineRequest(
        prompt_token_ids=_PROMPT,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0),
        seed=1,
        acceptance_method=AcceptanceMethod.REJECTION,
        rules=rules,
    )
