"""Drives session loops against toy services without an event loop: rounds of messages, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.ports import DraftEvent, EventBatch, TargetEvent
from outrider.types import AcceptanceMethod, SamplingParams
from outrider_coordinator.acceptance import JudgeRules, judging_rule
from outrider_coordinator.session.actions import (
    Action,
    DraftWaitBegan,
    DraftWaitEnded,
    Fail,
    Finish,
    Park,
    RetryDraftAfter,
    StepEnded,
    ToDraft,
    ToTarget,
)
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.speculation import DraftLengthPolicy


def make_plan(
    *,
    vocab_size: int,
    prompt: Sequence[int] = (0,),
    max_tokens: int = 16,
    temperature: float = 1.0,
    method: AcceptanceMethod = AcceptanceMethod.REJECTION,
    seed: int = 0,
    **fields: Any,
) -> EngineRequest:
    sampling = fields.pop("sampling", None) or SamplingParams(temperature=temperature)
    rules = JudgeRules(judging_rule(method, temperature=temperature), vocab_size)
    return EngineRequest(
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        acceptance_method=method,
        rules=rules,
        **fields,
    )


@dataclass
class Driven:
    """One session and what it asked for besides commands."""

    loop: SessionLoop
    session: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    steps: list[StepEnded] = field(default_factory=list)
    ending: Finish | Fail | None = None
    parked: list[Park] = field(default_factory=list)
    timer: int | None = None
    retries: list[RetryDraftAfter] = field(default_factory=list)

    def take(self) -> tuple[list[Any], list[Any]]:
        """Note all actions; the commands among them, (to the draft, to the target)."""
        to_draft: list[Any] = []
        to_target: list[Any] = []
        for action in self.loop.take_actions():
            self._note(action, to_draft, to_target)
        return to_draft, to_target

    def _note(self, action: Action, to_draft: list[Any], to_target: list[Any]) -> None:
        if isinstance(action, ToDraft):
            to_draft.append(action.command)
        elif isinstance(action, ToTarget):
            to_target.append(action.command)
        elif isinstance(action, StepEnded):
            self.steps.append(action)
            self.loop.spec_stats.count_step(action)
            self.token_ids.extend(action.token_ids)
            self.text += self.loop.output.take_text()
        elif isinstance(action, Finish | Fail):
            assert self.ending is None, "a session ends once"
            self.ending = action
            self.text += self.loop.output.take_text()
        elif isinstance(action, Park):
            self.parked.append(action)
        elif isinstance(action, DraftWaitBegan):
            self.timer = action.step
        elif isinstance(action, DraftWaitEnded):
            self.timer = None
        else:
            self.retries.append(action)


class Core(Protocol):
    """Answers a message at once: a core of ``tests.support`` or a block service of ``blocks``."""

    def handle(self, commands: Sequence[Any]) -> EventBatch[Any] | Sequence[Any]: ...


def answer(core: Core, commands: Sequence[Any]) -> list[Any]:
    answers = core.handle(commands)
    return list(answers.events if isinstance(answers, EventBatch) else answers)


class Bench:
    """Sessions against one draft and one target, in lock-step rounds; messages may be held up or changed."""

    def __init__(self, target: Core, draft: Core | None = None, *, draft_length: int = 4, **policy: Any) -> None:
        self.target, self.draft = target, draft
        self.policy = DraftLengthPolicy(draft_length, **policy)
        self.facts: DraftFacts | None = None if draft is None else DraftFacts()
        self.sessions: dict[int, Driven] = {}
        self.to_draft: list[Any] = []
        self.to_target: list[Any] = []
        self.sent_to_draft: list[Any] = []
        self.sent_to_target: list[Any] = []
        self.draft_answers = True
        """True if the draft's answers arrive; those that do not are kept in ``late``."""
        self.late: list[DraftEvent] = []
        self.change_draft_events: Callable[[list[DraftEvent]], list[DraftEvent]] = list
        self.change_target_events: Callable[[list[TargetEvent]], list[TargetEvent]] = list

    def add(self, plan: EngineRequest, **arguments: Any) -> Driven:
        session = len(self.sessions) + 1
        driven = Driven(SessionLoop(plan, self.policy, draft=self.facts, **arguments), session)
        self.sessions[session] = driven
        driven.loop.start(session)
        self.collect(driven)
        return driven

    def tell(self, driven: Driven, event: Callable[[SessionLoop], None]) -> None:
        """An event of the driver's own."""
        event(driven.loop)
        self.collect(driven)

    def collect(self, driven: Driven) -> None:
        to_draft, to_target = driven.take()
        self.to_draft += to_draft
        self.to_target += to_target

    def turn_draft(self) -> None:
        """Deliver what waits for the draft, and its answers."""
        commands, self.to_draft = self.to_draft, []
        self.sent_to_draft += commands
        if self.draft is None or not commands:
            return
        events = self.change_draft_events(answer(self.draft, commands))
        if self.draft_answers:
            self.deliver_draft(events)
        else:
            self.late += events

    def turn_target(self) -> None:
        """Deliver what waits for the target, and its answers."""
        commands, self.to_target = self.to_target, []
        self.sent_to_target += commands
        if commands:
            self.deliver_target(self.change_target_events(answer(self.target, commands)))

    def deliver_draft(self, events: Iterable[DraftEvent]) -> None:
        for event in events:
            driven = self.sessions[event.session]
            driven.loop.on_draft_event(event)
            self.collect(driven)

    def deliver_target(self, events: Iterable[TargetEvent]) -> None:
        for event in events:
            driven = self.sessions[event.session]
            driven.loop.on_target_event(event)
            self.collect(driven)

    def time_out(self) -> None:
        """The draft's time is up for every session that waits for it."""
        for driven in self.sessions.values():
            if driven.timer is not None:
                timer, driven.timer = driven.timer, None
                driven.loop.draft_timed_out(timer)
                self.collect(driven)

    def round(self) -> None:
        """Both services once."""
        self.turn_draft()
        self.turn_target()

    def run(self, *, max_rounds: int = 10_000) -> None:
        """Run until nothing is left to deliver."""
        for _ in range(max_rounds):
            if not (self.to_draft or self.to_target):
                return
            self.round()
        raise AssertionError("the sessions never came to an end")


def generate(target: Core, draft: Core | None, plan: EngineRequest, *, draft_length: int = 4) -> Driven:
    """One session from start to end."""
    bench = Bench(target, draft, draft_length=draft_length)
    driven = bench.add(plan)
    bench.run()
    return driven
