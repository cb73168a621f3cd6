"""The buffer between target and draft: what it keeps of what comes, what it brings, and how much it may hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.ports import Score, Scores, TargetEvent
from outrider.types import HiddenStates
from outrider_coordinator.session import hidden_states
from outrider_coordinator.session.hidden_states import HiddenStateBuffer
from outrider_coordinator.session.service_state import DraftFacts
from tests.coordinator.driving import Driven
from tests.coordinator.setting import Setting, own_tokens, plan_of


def states(start: int, end: int, *, width: int = 1) -> HiddenStates:
    """Each value is its position, in one byte a row."""
    rows = end - start
    return HiddenStates(start, rows, width, "float32", bytes(range(start, end)))


def test_only_what_goes_on_is_kept() -> None:
    buffer = HiddenStateBuffer()
    buffer.put(states(0, 5), 3)
    buffer.put(states(5, 8), 8)  # leaves a gap
    assert (buffer.start, buffer.end) == (0, 3)
    buffer.put(states(1, 6), 6)  # overlaps
    assert buffer.first_part() == states(0, 6)
    buffer.put(states(6, 7, width=2), 7)  # of other layers
    assert buffer.end == 6


def test_what_the_draft_holds_is_forgotten() -> None:
    buffer = HiddenStateBuffer()
    for start in range(0, 9, 3):
        buffer.put(states(start, start + 3), 9)
    buffer.move_to(4)
    assert buffer.first_part() == states(4, 9)
    buffer.move_to(2)  # it lost some
    assert (buffer.start, buffer.end, buffer.first_part()) == (2, 2, None)
    buffer.put(states(2, 4), 4)
    buffer.move_to(7)  # it holds more than has come
    assert (buffer.start, buffer.end) == (7, 7)


def test_long_texts_go_in_parts() -> None:
    buffer = HiddenStateBuffer()
    for start in range(0, 12, 4):
        buffer.put(states(start, start + 4), 12)
    assert buffer.first_part(max_bytes=9) == states(0, 8)
    assert buffer.first_part(max_bytes=1) == states(0, 4)


def test_it_is_a_run_of_positions_whatever_comes() -> None:
    generator = random.Random(3)
    buffer = HiddenStateBuffer()
    for _ in range(3000):
        start = max(0, buffer.end + generator.randint(-3, 2))
        if generator.random() < 0.6 and start < 200:
            end = start + generator.randint(0, 6)
            buffer.put(states(start, end), end - generator.randint(0, 2))
        else:
            buffer.move_to(generator.randint(0, 190) if generator.random() < 0.1 else max(0, buffer.end - 2))
        part = buffer.first_part()
        assert (part is None) == (buffer.num_rows == 0)
        assert part is None or part == states(buffer.start, buffer.end)


class ReadingDraft:
    """A setting whose target hands over the states that a score asks for, one byte a position."""

    def __init__(self, max_length: int = 0) -> None:
        self.setting = Setting(draft_length=2)
        self.setting.bench.facts = DraftFacts(max_length=max_length, hidden_state_layers=(1,))
        self.setting.bench.change_target_events = self._with_states
        self.most_rows = 0

    def _with_states(self, events: Sequence[TargetEvent]) -> list[TargetEvent]:
        for driven in self.setting.bench.sessions.values():
            self.most_rows = max(self.most_rows, driven.loop.draft.states.num_rows)
        asked = {command.generation: command for command in self.scores}
        return [
            self._answered(asked[event.generation], event) if isinstance(event, Scores) else event for event in events
        ]

    @staticmethod
    def _answered(asked: Score, event: Scores) -> Scores:
        first = asked.hidden_states_from
        if first is None:
            return event
        assert asked.num_kept_tokens <= first
        return replace(event, hidden_states=states(first, event.base_length + len(asked.draft_token_ids)))

    @property
    def scores(self) -> list[Score]:
        return [command for command in self.setting.bench.sent_to_target if isinstance(command, Score)]

    def start(self) -> Driven:
        return self.setting.bench.add(plan_of(temperature=0.0, max_tokens=60))


def test_no_states_are_wanted_past_the_length_of_the_draft() -> None:
    reading = ReadingDraft(max_length=20)
    driven = reading.start()
    reading.setting.bench.run()
    assert driven.token_ids == own_tokens(plan_of(temperature=0.0, max_tokens=60))
    wanted = [score.hidden_states_from is not None for score in reading.scores]
    assert any(wanted)
    assert wanted[-30:] == [False] * 30
    assert reading.most_rows < 20


def test_a_draft_that_does_not_answer_leaves_no_more_than_one_part_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "MAX_FEED_BYTES", 6)
    reading, most_of_a_step = ReadingDraft(), 3
    bench = reading.setting.bench
    driven = reading.start()
    for _ in range(4):
        bench.round()
    bench.draft_answers = False
    for _ in range(20):
        bench.round()
        bench.time_out()
    assert reading.most_rows <= 6 + most_of_a_step
    assert reading.scores[-1].hidden_states_from is None
    bench.draft_answers = True
    bench.deliver_draft(bench.late)
    bench.run()
    assert driven.token_ids == own_tokens(plan_of(temperature=0.0, max_tokens=60))
    assert any(score.hidden_states_from is not None and score.draft_token_ids for score in reading.scores[-10:])
