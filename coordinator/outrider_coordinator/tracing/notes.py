"""Notes of a sampled request while it runs: numbers, made into spans when it ends.

Every note is a few readings of this process's monotonic clock, in nanoseconds. Times of services come with their
answers and are intervals of their own clocks; no reading of one clock is ever subtracted from another's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.ports import (
    DraftCommand,
    DraftEvent,
    Extend,
    HiddenStateChunk,
    ItemTiming,
    Score,
    TargetCommand,
    TargetEvent,
)
from outrider_coordinator.session.actions import Action, DraftWaitBegan, StepEnded, ToDraft, ToTarget

Clock = Callable[[], int]


@dataclass(slots=True)
class Exchange:
    """One item and its answer, as the coordinator saw them."""

    is_draft: bool
    generation: int
    is_prefill: bool
    """The service computes the text from its beginning."""
    draft_length: int
    """Draft tokens asked for, or sent to be judged."""
    sent_ns: int
    """Time at which it left, or the service had it from a peer at the latest."""
    answered_ns: int | None = None
    timing: ItemTiming | None = None
    outcome: str = "no answer"


@dataclass(slots=True)
class Step:
    """One round, from the end of the one before."""

    number: int
    began_ns: int
    exchanges: list[Exchange] = field(default_factory=list)
    waited_for_draft: bool = False
    judging_ns: int | None = None
    """Time at which the scores were at hand; None while they are not."""
    ended_ns: int | None = None
    base_length: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    no_draft_reason: str = ""


class Notes:
    """Notes of one request. Steps past ``max_steps`` are counted and nothing more."""

    def __init__(self, max_steps: int, *, clock: Clock = time.perf_counter_ns) -> None:
        self.clock = clock
        self.arrived_ns = clock()
        self.epoch_ns = time.time_ns() - self.arrived_ns
        """Added to a reading of the clock it is a time of day."""
        self.model = ""
        self.grammar_ns: tuple[int, int] | None = None
        """Clock readings before and after the grammar was compiled."""
        self.tokenized_ns: int | None = None
        self.admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        self.ended_ns: int | None = None
        self.num_steps_left_out = 0
        self.steps: list[Step] = []
        self._max_steps = max_steps
        self._step: Step | None = None
        self._asked: dict[bool, Exchange | None] = {True: None, False: None}
        """Exchanges without an answer: with the draft and with the target."""
        self._scored_ns: int | None = None
        """Time at which the latest scores were at hand."""

    @property
    def is_full(self) -> bool:
        """True if the steps to come are only counted."""
        return len(self.steps) >= self._max_steps and self._step is None

    def taken_in(self, model: str) -> None:
        """The request is ready to wait its turn for this model."""
        self.model = model
        self.tokenized_ns = self.clock()

    def admitted(self) -> None:
        """The request runs; the first time counts."""
        if self.admitted_ns is None:
            self.admitted_ns = self.clock()
            self._begin_step(self.admitted_ns)

    def take(self, action: Action, at_ns: int | None = None) -> None:
        """Note an action of the session: items that go out, waits for the draft, and verdicts.

        ``at_ns``: when it was decided, by this clock; None: now.
        """
        now = self.clock() if at_ns is None else at_ns
        match action:
            case ToDraft(command) | ToTarget(command):
                self._sent(command, now)
            case StepEnded():
                self._step_ended(action, now)
            case DraftWaitBegan() if self._step is not None:
                self._step.waited_for_draft = True

    def _sent(self, command: DraftCommand | TargetCommand, now: int) -> None:
        """A command goes out; only items are noted, and in steps that are shown."""
        if isinstance(command, Extend | Score):
            is_draft = isinstance(command, Extend)
            length = command.draft_length if isinstance(command, Extend) else len(command.draft_token_ids)
            self.asked(command.generation, command.num_kept_tokens, length, now, is_draft=is_draft)

    def asked(self, generation: int, num_kept_tokens: int, draft_length: int, at_ns: int, *, is_draft: bool) -> None:
        """An item goes out: an ``Extend`` or a ``Score``."""
        if self._step is None:
            return
        exchange = Exchange(is_draft, generation, num_kept_tokens == 0, draft_length, at_ns)
        self._step.exchanges.append(exchange)
        self._asked[is_draft] = exchange

    def answered(self, event: DraftEvent | TargetEvent, timing: ItemTiming | None, *, is_draft: bool) -> None:
        """An event has come; one that answers what was asked last is noted."""
        asked = self._asked[is_draft]
        if asked is None or event.generation != asked.generation or isinstance(event, HiddenStateChunk):
            return
        self.was_answered(type(event).__name__, timing, self.clock(), is_draft=is_draft)

    def was_answered(self, outcome: str, timing: ItemTiming | None, at_ns: int, *, is_draft: bool) -> None:
        """The answer to what was asked last has come."""
        asked, self._asked[is_draft] = self._asked[is_draft], None
        if asked is None:
            return
        asked.answered_ns, asked.timing, asked.outcome = at_ns, timing, outcome
        if timing is not None:  # a peer may have brought it what is asked here
            asked.sent_ns = min(asked.sent_ns, at_ns - timing.total_ns)
        if not is_draft:
            self._scored_ns = at_ns

    def _step_ended(self, ended: StepEnded, now: int) -> None:
        """A verdict was reached; the next step begins."""
        self.first_token_ns = self.first_token_ns or now
        step = self._step
        if step is None:
            self.num_steps_left_out += 1
            return
        step.judging_ns, step.ended_ns = self._scored_ns, now
        step.base_length, step.num_drafted, step.num_accepted = (
            ended.base_length,
            ended.num_draft_tokens,
            ended.num_accepted,
        )
        step.no_draft_reason = "" if ended.num_draft_tokens else ended.no_draft_reason.value
        self._step = None
        self._begin_step(now)

    def ended(self) -> None:
        """The request is over; a step that nothing was asked in is none."""
        self.ended_ns = self.clock()
        if self._step is not None and not self._step.exchanges:
            self.steps.remove(self._step)

    def _begin_step(self, now: int) -> None:
        if len(self.steps) < self._max_steps:
            self._step = Step(len(self.steps) + 1, now)
            self.steps.append(self._step)
