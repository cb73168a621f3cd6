"""The buffer between target and draft: what it keeps of what comes, what it brings, and how much it may hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.ports import DraftEvent, Open, Prepare, Proposal, Score, Scores, SessionLost, TargetEvent
from outrider.types import HiddenStates
from outrider_coordinator.session import draft_side, hidden_states
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.hidden_states import HiddenStateBuffer
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.speculation import ControlledSession, DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft
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


@pytest.mark.parametrize(("max_bytes", "end"), [(9, 8), (1, 4)])
def test_long_texts_go_in_parts(max_bytes: int, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "MAX_FEED_BYTES", max_bytes)
    buffer = HiddenStateBuffer()
    for start in range(0, 12, 4):
        buffer.put(states(start, start + 4), 12)
    assert buffer.first_part() == states(0, end)


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
        asked = {(command.session, command.generation): command for command in self.scores}
        return [
            self._answered(asked[event.session, event.generation], event) if isinstance(event, Scores) else event
            for event in events
        ]

    @staticmethod
    def _answered(asked: Score, event: Scores) -> Scores:
        first = asked.hidden_states_from
        if first is None:
            return event
        assert asked.num_kept_tokens <= first
        return replace(event, hidden_states=states(first, event.base_length + len(asked.draft_token_ids)))

    def holding_nothing(self, events: Sequence[DraftEvent]) -> list[DraftEvent]:
        """Answers of a draft that was sent text without states."""
        asked = {(command.session, command.generation): command for command in self.setting.extends}
        return [
            replace(event, base_length=0)
            if isinstance(event, Proposal) and asked[event.session, event.generation].hidden_states is None
            else event
            for event in events
        ]

    @property
    def scores(self) -> list[Score]:
        return [command for command in self.setting.bench.sent_to_target if isinstance(command, Score)]

    def start(self, **fields: Any) -> Driven:
        return self.setting.bench.add(plan_of(temperature=0.0, max_tokens=60, **fields))


def test_no_states_are_wanted_past_the_length_of_the_draft() -> None:
    reading = ReadingDraft(max_length=20)
    driven = reading.start()
    reading.setting.bench.run()
    assert driven.token_ids == own_tokens(plan_of(temperature=0.0, max_tokens=60))
    wanted = [score.hidden_states_from is not None for score in reading.scores]
    assert any(wanted)
    assert wanted[-30:] == [False] * 30
    assert reading.most_rows < 20


def test_a_request_without_speculation_is_decoded_ahead_and_hands_over_no_states() -> None:
    reading = ReadingDraft()
    driven = reading.start(num_speculative_tokens=0)
    reading.setting.bench.run()
    assert driven.token_ids == own_tokens(plan_of(temperature=0.0, max_tokens=60))
    assert not reading.setting.extends
    assert all(score.hidden_states_from is None for score in reading.scores)
    assert any(isinstance(command, Prepare) for command in reading.setting.bench.sent_to_target)


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


class Switched(DraftLengthPolicy):
    """A controlled policy whose mode a test sets."""

    def __init__(self) -> None:
        super().__init__(2, is_controlled=True)
        self.is_speculating = True

    def length(self, session: ControlledSession) -> int:
        return 2 if self.is_speculating else 0

    def lengths(self, sessions: Sequence[ControlledSession]) -> list[int]:
        return [self.length(session) for session in sessions]

    def is_to_draft(self, session: ControlledSession) -> bool:
        return self.is_speculating

    def no_draft_reason(self, session: ControlledSession) -> WithoutDraft | None:
        return WithoutDraft.NOT_WORTH


def test_plain_decoding_hands_over_nothing_and_drafting_goes_on_from_what_the_draft_holds() -> None:
    reading = ReadingDraft()
    bench = reading.setting.bench
    policy = bench.policy = Switched()
    driven = reading.start()
    for _ in range(8):
        bench.round()
    drafted = driven.loop.spec_stats.num_draft_tokens
    assert drafted > 0
    policy.is_speculating = False
    bench.round()  # what was drafted
    num_sent = len(bench.sent_to_target)
    for _ in range(7):
        bench.round()
    held, plain = driven.loop.draft.held, bench.sent_to_target[num_sent:]
    scores = [command for command in plain if isinstance(command, Score)]
    assert len(scores) > 3
    assert all(score.hidden_states_from is None and not score.draft_token_ids for score in scores)
    assert any(isinstance(command, Prepare) for command in plain)
    assert driven.loop.draft.states.num_rows == 0
    policy.is_speculating = True
    num_sent = len(reading.scores)
    bench.run()
    first = next(score for score in reading.scores[num_sent:] if score.hidden_states_from is not None)
    assert first.hidden_states_from == held - 1
    assert first.num_kept_tokens <= held - 1
    assert driven.loop.spec_stats.num_draft_tokens > drafted
    assert driven.token_ids == own_tokens(plan_of(temperature=0.0, max_tokens=60))


def test_a_draft_takes_the_states_of_a_prompt_also_when_decoding_has_turned_plain_meanwhile() -> None:
    reading = ReadingDraft()
    bench = reading.setting.bench
    bench.change_draft_events = reading.holding_nothing
    policy = bench.policy = Switched()
    with_states = bench.change_target_events

    def turned_plain(events: Sequence[TargetEvent]) -> list[TargetEvent]:
        policy.is_speculating = False
        return with_states(list(events))

    bench.change_target_events = turned_plain
    prompt = [index % 7 for index in range(40)]
    driven = reading.start(prompt=prompt)
    bench.run()
    assert [score.hidden_states_from for score in reading.scores[:2]] == [0, None]
    fed = [extend.hidden_states for extend in reading.setting.extends if extend.hidden_states is not None]
    assert [(one.start, one.end) for one in fed] == [(0, len(prompt))]
    assert driven.token_ids == own_tokens(plan_of(temperature=0.0, max_tokens=60, prompt=prompt))


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}, {"prompt": [index % 7 for index in range(90)]}])
def test_a_head_that_is_not_used_costs_no_command(fields: dict[str, Any]) -> None:
    """Requests to the target are those without a draft, in the same rounds, when nothing is to be drafted."""
    plain, reading = Setting(has_draft=False), ReadingDraft()
    policy = reading.setting.bench.policy = Switched()
    policy.is_speculating = False
    plan = plan_of(**{"temperature": 0.0, "max_tokens": 60, **fields})
    rounds: list[int] = []
    for setting in (plain, reading.setting):
        setting.bench.add(plan)
        count = 0
        while setting.bench.to_draft or setting.bench.to_target:
            setting.bench.round()
            count += 1
        rounds.append(count)
    assert reading.setting.bench.sent_to_draft == []
    found = [
        replace(command, hidden_state_layers=()) if isinstance(command, Open) else command
        for command in reading.setting.bench.sent_to_target
    ]
    assert found == plain.bench.sent_to_target
    assert rounds[0] == rounds[1]
    assert any(isinstance(command, Prepare) for command in found) == (plan.max_tokens > 1)


class LongPrompt(ReadingDraft):
    """A prompt of 90 tokens whose states go in parts of at most eight, one byte a position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(hidden_states, "MAX_FEED_BYTES", 8)
        monkeypatch.setattr(draft_side, "MAX_FEED_BYTES", 8)
        self.setting.bench.facts = DraftFacts(hidden_state_layers=(1,), hidden_state_bytes=1)
        self.setting.bench.change_draft_events = self.holding_nothing
        self.plan = plan_of(prompt=[index % 7 for index in range(90)], temperature=0.0, max_tokens=20)
        self.driven = self.setting.bench.add(self.plan)

    def is_right(self) -> bool:
        return self.driven.token_ids == own_tokens(self.plan)

    @property
    def parts(self) -> list[int]:
        """Tokens that each score of the prompt brought."""
        return [len(score.token_ids) for score in self.scores if len(score.token_ids) > 3]


def test_a_long_prompt_goes_in_parts_and_no_more_than_two_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    long = LongPrompt(monkeypatch)
    long.setting.bench.run()
    assert long.is_right()
    assert long.parts == [8] * 11
    assert long.most_rows <= 16
    assert any(score.draft_token_ids for score in long.scores)


def test_states_of_many_prompts_wait_for_room_and_the_others_are_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = ReadingDraft()
    bench = reading.setting.bench
    monkeypatch.setattr(draft_side, "MAX_FEED_BYTES", 20)
    bench.facts = DraftFacts(hidden_state_layers=(1,), hidden_state_bytes=1)
    bench.change_draft_events = reading.holding_nothing
    plans = [plan_of(prompt=[index % 7 for index in range(first, first + 20)], temperature=0.0) for first in range(12)]
    sessions = [bench.add(plan) for plan in plans]
    for driven in sessions:
        bench.policy.enter(driven.loop.speculation, "target")
    most = 0
    while bench.to_target or bench.to_draft:
        bench.round()
        most = max(most, sum(driven.loop.draft.states.num_rows for driven in sessions))
    assert 4 * 20 <= most <= 4 * 20 + 12 * 3  # the others' steps bring a few
    assert [driven.token_ids for driven in sessions] == [own_tokens(plan) for plan in plans]
    assert all(driven.loop.spec_stats.num_draft_tokens for driven in sessions)


def test_a_draft_that_takes_no_part_is_not_waited_for_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    long = LongPrompt(monkeypatch)
    bench = long.setting.bench
    for _ in range(3):
        bench.round()
    bench.draft_answers = False
    for _ in range(3):
        bench.round()
    assert not bench.to_target
    assert long.driven.loop.target.is_held_back
    bench.time_out()
    bench.round()
    assert sum(long.parts) == 90
    assert long.most_rows <= 16
    bench.draft_answers = True
    bench.deliver_draft(bench.late)
    bench.run()
    assert long.is_right()


@pytest.mark.parametrize("fault", ["draft_lost", "session_lost", "target_lost"])
def test_either_side_is_lost_between_two_parts(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    long = LongPrompt(monkeypatch)
    bench, loop = long.setting.bench, long.driven.loop
    for _ in range(3):
        bench.round()
    bench.draft_answers = False
    for _ in range(3):
        bench.round()
    assert loop.target.is_held_back
    if fault == "draft_lost":
        bench.tell(long.driven, SessionLoop.draft_lost)
    elif fault == "target_lost":
        bench.tell(long.driven, SessionLoop.target_lost)
        bench.tell(long.driven, SessionLoop.target_back)
    else:
        assert loop.draft.asked is not None
        lost = SessionLost(long.driven.session, loop.draft.asked.generation, "its plane is closed")
        bench.late.clear()
        bench.draft_answers = True
        bench.deliver_draft([lost])
    bench.draft_answers = True
    bench.deliver_draft(bench.late)
    bench.run()
    assert long.is_right()
