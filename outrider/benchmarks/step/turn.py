"""Processor time of one step by stage: the coordinator and two engine cores in one thread.

The coordinator, both cores and all conversions are real; the models are stand-ins that take no processor time, and
messages go from end to end as bytes without gRPC. So every stage is timed by itself, by the thread's processor time,
which another process on the machine does not change. What is done while a forward runs is counted apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import uvloop

from outrider.benchmarks.step.stand_in import StandInExecutor, describe_stand_in, new_session_registry, propose, score
from outrider.config import CoordinatorSettings
from outrider.demo import TARGET
from outrider.generation import GenerationRequest
from outrider.ports import EventBatch
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import ExecutorOutput
from outrider.stalls import NO_STALL, Stall
from outrider.transport.convert.commands import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    target_commands_from_proto,
    target_commands_to_proto,
)
from outrider.transport.convert.events import (
    draft_events_from_proto,
    draft_events_to_proto,
    target_events_from_proto,
    target_events_to_proto,
)
from outrider.transport.convert.generation import delta_to_proto
from outrider.types import AcceptanceMethod, ModelDescription, SamplingParams
from outrider.v1 import link_pb2 as pb
from outrider_coordinator.service import Coordinator
from outrider_coordinator.session import draft_events, target_events
from outrider_coordinator.session.prepared_verdicts import PreparedVerdicts

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

BETWEEN_FORWARDS = ("answer", "encode", "read", "judge", "decide", "write", "decode", "take in", "schedule")
"""Stages that a device waits for: of a service and of the coordinator, in their order. A forward's end begins them, the
next launch ends them."""
FORWARD = "forward"
"""Time of the stand-ins for their answers; not reported."""
DELIVER = "deliver"
"""All other work: texts, streams, statistics, the event loop."""
STAGES = (*BETWEEN_FORWARDS, DELIVER)
_FORWARD_S, _FORWARD_A_SESSION_S = 1e-3, 1e-4
"""Time that a stand-in computes: what need not be done between forwards is done meanwhile."""
_PROMPT = (11, 7, 5, 3)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Numbers of sessions and steps to time."""

    num_sessions: tuple[int, ...] = (1, 32, 64, 128, 256)
    temperature: float = 0.0
    num_speculative_tokens: int = 4
    """0: the target alone."""
    acceptance: float = 0.75
    num_samples: int = 200
    num_warmups: int = 20


@dataclass(frozen=True, slots=True)
class TurnCosts:
    """Microseconds of processor time, per session and step, by stage."""

    num_sessions: int
    micros: dict[str, float]

    @property
    def between_forwards_ms(self) -> float:
        """Time between forwards for all sessions and one step, in milliseconds."""
        return 1e-3 * self.num_sessions * sum(self.micros[stage] for stage in BETWEEN_FORWARDS)


class StepTimes:
    """Processor time of this thread by stage, an inner stage not counted in the outer one; and the steps it went to."""

    def __init__(self, num_warmups: int, num_samples: int) -> None:
        """Stage times over all sessions: the first ``num_warmups`` steps are left out, the ``num_samples`` after them
        are timed.
        """
        self._begins, self._ends = num_warmups, num_warmups + num_samples
        self._spent_ns: defaultdict[str, int] = defaultdict(int)
        self._open: dict[object, str] = {}
        """Stages that have begun and not ended, the last to begin at the end. They are not always nested: one that
        awaits may end after another that began meanwhile."""
        self._charged_ns = 0
        self._num_steps = 0
        self._readings: list[tuple[int, int, dict[str, int]]] = []

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count the block as this stage."""
        block = object()
        self._charge()
        self._open[block] = stage
        try:
            yield
        finally:
            self._charge()
            del self._open[block]

    def _charge(self) -> int:
        """Count the time since this was last called as the stage that began last; returns the thread's time."""
        now_ns = time.thread_time_ns()
        if self._open:
            self._spent_ns[next(reversed(self._open.values()))] += now_ns - self._charged_ns
        self._charged_ns = now_ns
        return now_ns

    def discount(self, stage: str, since_ns: int) -> None:
        """Exclude the time since this reading from the stage, which has just ended."""
        self._spent_ns[stage] -= self._charged_ns - since_ns

    def wrap(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted as this stage."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            with self.timed(stage):
                return function(*arguments, **named)

        return timed

    def note_steps(self, count: int) -> None:
        """Add sessions that have ended a step."""
        before, self._num_steps = self._num_steps, self._num_steps + count
        if any(before < edge <= self._num_steps for edge in (self._begins, self._ends)):
            self._readings.append((self._num_steps, self._charge(), dict(self._spent_ns)))

    def micros(self) -> dict[str, float]:
        """Microseconds per session and step, by stage."""
        (first, began_ns, before), (last, ended_ns, after) = self._readings
        spent = {stage: after.get(stage, 0) - before.get(stage, 0) for stage in BETWEEN_FORWARDS}
        forward_ns = after.get(FORWARD, 0) - before.get(FORWARD, 0)
        spent[DELIVER] = ended_ns - began_ns - sum(spent.values()) - forward_ns
        return {stage: 1e-3 * spent_ns / (last - first) for stage, spent_ns in spent.items()}


def _note_nothing(count: int) -> None:
    """Steps are those of the target."""


@dataclass(frozen=True, slots=True)
class _Wire:
    """The conversions of one side."""

    commands: Any
    events: Any
    write: Callable[..., Any]
    decode: Callable[..., Any]
    encode: Callable[..., Any]
    read: Callable[..., Any]


WIRES = {
    "draft": _Wire(
        pb.DraftCommands,
        pb.DraftEvents,
        draft_commands_to_proto,
        draft_commands_from_proto,
        draft_events_to_proto,
        draft_events_from_proto,
    ),
    "target": _Wire(
        pb.TargetCommands,
        pb.TargetEvents,
        target_commands_to_proto,
        target_commands_from_proto,
        target_events_to_proto,
        target_events_from_proto,
    ),
}


class WiredPort(Generic[CommandT, EventT]):
    """A port whose core steps on the caller's event loop; everything passes as bytes."""

    def __init__(self, core: TimedCore, role: str, times: StepTimes) -> None:
        self._core, self._role, self._times = core, role, times

    async def describe(self) -> ModelDescription:
        """Both sides are of one device, so that all sessions share each forward."""
        return replace(describe_stand_in(self._role), device_id="stand-in")

    async def attach(self) -> WiredLink[CommandT, EventT]:
        """The link; there is one."""
        note = self._times.note_steps if self._role == "target" else _note_nothing
        return WiredLink(self._core, WIRES[self._role], self._times, note)


class WiredLink(Generic[CommandT, EventT]):
    """``ports.Link`` of such a port."""

    def __init__(
        self,
        core: TimedCore,
        wire: _Wire,
        times: StepTimes,
        note_answers: Callable[[int], None],
    ) -> None:
        self._core, self._wire, self._timed = core, wire, times.timed
        self._note_answers = note_answers
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()

    @property
    def num_pages_free(self) -> int:
        """Free KV pages of the core."""
        return self._core.num_pages_free

    @property
    def stall(self) -> Stall:
        """None is measured."""
        return NO_STALL

    def send(self, commands: Sequence[CommandT]) -> None:
        """Hand the commands to the core, which steps later."""
        with self._timed("write"):
            content = self._wire.write(commands).SerializeToString()
        with self._timed("decode"):
            arrived = self._wire.decode(self._wire.commands.FromString(content))
        with self._timed("take in"):
            self._core.handle(0, arrived)
        asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        """Start a forward if there is none, and let it take its time."""
        executor = self._core.executor
        while self._core.has_work and executor.running is None:
            with self._timed("schedule"):
                messages = self._core.step()
            if executor.running is not None:
                self._core.times.discount("schedule", executor.launched_ns)
                busy_s = _FORWARD_S + _FORWARD_A_SESSION_S * executor.num_sessions
                asyncio.get_running_loop().call_later(busy_s, self._end)
            self._tell(messages)

    def _end(self) -> None:
        """The forward has ended."""
        self._core.executor.running = None
        with self._timed("answer"):
            messages = self._core.step()
        self._tell(messages)
        self._start()

    def _tell(self, messages: Sequence[tuple[int, EventBatch[Any]]]) -> None:
        for _, batch in messages:
            with self._timed("encode"):
                content = self._wire.encode(batch).SerializeToString()
            self._answers.put_nowait(content)
        self._core.post_step()

    async def events(self) -> AsyncIterator[EventBatch[EventT]]:
        """The answers; what the coordinator does before it takes the next is timed as its decision."""
        while (content := await self._answers.get()) is not None:
            with self._timed("read"):
                batch = self._wire.read(self._wire.events.FromString(content))
            with self._timed("decide"):
                yield batch
            self._note_answers(len(batch.events) + len(batch.sessions_in_batch))

    async def close(self) -> None:
        """End the answers."""
        self._answers.put_nowait(None)


def run_turns(plan: TurnPlan, *, on_done: Callable[[], None] = lambda: None) -> tuple[TurnCosts, ...]:
    """Time every number of sessions."""
    found = []
    for num_sessions in plan.num_sessions:
        found.append(uvloop.run(run(plan, num_sessions)))
        on_done()
    return tuple(found)


async def run(plan: TurnPlan, num_sessions: int) -> TurnCosts:
    """Costs of turns of that many sessions."""
    times = StepTimes(num_sessions * plan.num_warmups, num_sessions * plan.num_samples)
    target = timed_core("target", plan, times)
    draft = timed_core("draft", plan, times) if plan.num_speculative_tokens else None
    coordinator = Coordinator(
        WiredPort(target, "target", times),
        None if draft is None else WiredPort(draft, "draft", times),
        CoordinatorSettings.model_validate({"tokenizer": str(TARGET), "draft_length": "fixed"}),
    )
    await coordinator.start()
    with _timed_judging(times):
        await asyncio.gather(*(_generate(coordinator, plan, seed) for seed in range(num_sessions)))
    await coordinator.close()
    return TurnCosts(num_sessions, times.micros())


def timed_core(role: str, plan: TurnPlan, times: StepTimes) -> TimedCore:
    """Core of a stand-in service whose forwards are timed."""
    answer: Any = functools.partial(propose if role == "draft" else score, acceptance=plan.acceptance)
    return TimedCore(TimedExecutor(answer, times), times)


class TimedExecutor(StandInExecutor[Any, Any]):
    """Forwards end when they are told to. The answers are the forward's, which is no work between forwards."""

    def __init__(self, answer: Any, times: StepTimes) -> None:  # noqa: ANN401 - of either side
        super().__init__(answer, busy_s=0.0, note=lambda _what, _items: None)
        self._times = times
        self.running: _TimedForward | None = None
        self.num_sessions = 0
        """Sessions of the last forward."""
        self.launched_ns = 0
        """Launch time of the last forward, by the thread's time."""

    @property
    def is_asynchronous(self) -> bool:
        """True, as for a GPU's executors."""
        return True

    def start(self, batch: Sequence[tuple[Any, int]]) -> _TimedForward:
        """The forward runs until ``running`` is None."""
        return self._launch(functools.partial(self.execute, batch), len(batch))

    def start_step(self, step: Any, batch: Sequence[tuple[Any, int]] = ()) -> Any:  # noqa: ANN401
        """Start a step; time is taken."""
        forward = super().start_step(step, batch)
        return self._launch(forward.finish, len(step))

    def _launch(self, finish: Callable[[], ExecutorOutput[Any]], num_sessions: int) -> _TimedForward:
        self.running = forward = _TimedForward(self, self._times.wrap(FORWARD, finish))
        self.num_sessions, self.launched_ns = num_sessions, time.thread_time_ns()
        return forward


@dataclass(frozen=True, slots=True)
class _TimedForward:
    executor: TimedExecutor
    finish: Callable[[], ExecutorOutput[Any]]

    def is_done(self) -> bool:
        return self.executor.running is not self


class TimedCore(EngineCore[Any, Any, Any, Any]):
    """A core, and the executor that tells it when a forward has ended."""

    executor: TimedExecutor

    def __init__(self, executor: TimedExecutor, times: StepTimes) -> None:
        super().__init__(new_session_registry(), executor)
        self.executor, self.times = executor, times


@contextlib.contextmanager
def _timed_judging(times: StepTimes) -> Iterator[None]:
    places: tuple[tuple[Any, str], ...] = (
        (target_events, "judge"), (draft_events, "is_sound_proposal"), (PreparedVerdicts, "judge"),
    )  # fmt: skip
    originals = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, original in originals:
        setattr(place, name, times.wrap("judge", original))
    try:
        yield
    finally:
        for place, name, original in originals:
            setattr(place, name, original)


async def _generate(coordinator: Coordinator, plan: TurnPlan, seed: int) -> None:
    num_steps = plan.num_warmups + plan.num_samples + 2
    request = GenerationRequest(
        prompt_token_ids=_PROMPT,
        max_tokens=num_steps * (plan.num_speculative_tokens + 1),
        sampling=SamplingParams(temperature=plan.temperature),
        seed=seed,
        ignore_eos=True,
        acceptance_method=AcceptanceMethod.REJECTION,
        num_speculative_tokens=plan.num_speculative_tokens,
    )
    async for delta in coordinator.generate_stream(request):
        if delta.token_ids:
            delta_to_proto(delta).SerializeToString()
