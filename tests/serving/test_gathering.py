"""Running sessions wait for those that draft, where one group takes less time than two that take turns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from outrider.benchmarks.step.stamps import ENDED
from outrider.benchmarks.step.stand_in import VOCAB_SIZE, StandInExecutor, new_session_registry, score
from outrider.item_batch import command_batch
from outrider.serving.engine_core import EngineCore
from outrider.serving.token_budget import LONGEST_ABSENCE_NS, PrefillDelayPolicy
from tests.support.core_driver import Driver, open_session, score_item

AWAY, FORWARD = 100, 400
ONE, OTHER, THIRD = (1, 1), (1, 2), (1, 3)


def _by_bytes(_: int) -> float:
    """A forward that takes as long for any number of sessions."""
    return FORWARD


def _policy(*, away: int = AWAY) -> PrefillDelayPolicy:
    """Policy that has seen how long a session is away."""
    policy = PrefillDelayPolicy()
    policy.note_answer(ONE, 0)
    policy.note_return(ONE, away)
    return policy


def test_who_is_due_waits_for_who_is_away() -> None:
    policy = _policy()
    policy.note_answer(OTHER, 1000)
    policy.note_answer(THIRD, 1020)
    assert policy.gather_ns({ONE}, _by_bytes, 1030) == 1020 + AWAY + AWAY // 2 - 1030
    policy.note_return(THIRD, 1020 + AWAY)
    assert policy.gather_ns({ONE, THIRD}, _by_bytes, 1130) == 1000 + AWAY + AWAY // 2 - 1130
    policy.note_return(OTHER, 1000 + AWAY)
    assert policy.gather_ns({ONE, OTHER, THIRD}, _by_bytes, 1140) == 0


def test_who_is_late_or_has_ended_is_not_waited_for() -> None:
    policy = _policy()
    policy.note_answer(OTHER, 1000)
    assert policy.gather_ns({ONE}, _by_bytes, 1000 + AWAY + AWAY // 2 - 1) == 1
    assert policy.gather_ns({ONE}, _by_bytes, 1000 + AWAY + AWAY // 2) == 0
    policy.note_answer(OTHER, 2000)
    policy.note_end(OTHER)
    assert policy.gather_ns({ONE}, _by_bytes, 2010) == 0


def test_those_whose_next_items_are_here_but_not_begun_are_not_away() -> None:
    policy = _policy()
    policy.note_answer(ONE, 1000)
    policy.note_answer(OTHER, 1000)
    assert policy.gather_ns({ONE, OTHER}, _by_bytes, 1050) == 0


@pytest.mark.parametrize(
    ("away", "forward_ns"),
    [
        pytest.param(AWAY, lambda num_sessions: FORWARD * num_sessions, id="time of a forward grows with its sessions"),
        pytest.param(FORWARD, _by_bytes, id="drafts take as long as a forward"),
        pytest.param(AWAY, lambda _: None, id="no forward was seen"),
    ],
)
def test_groups_take_turns_where_that_takes_no_longer(away: int, forward_ns: Callable[[int], float | None]) -> None:
    policy = _policy(away=away)
    policy.note_answer(OTHER, 1000)
    assert policy.gather_ns({ONE}, forward_ns, 1010) == 0


def test_nobody_is_waited_for_before_an_absence_was_seen() -> None:
    policy = PrefillDelayPolicy()
    policy.note_answer(OTHER, 1000)
    assert policy.gather_ns({ONE}, _by_bytes, 1010) == 0


class Target:
    """A target whose forward takes ``FORWARD`` on its clock, and two sessions that take turns with three drafts."""

    def __init__(self, *, are_arrays: bool) -> None:
        self.now_ns, self.forwards, self.are_arrays = 0, list[int](), are_arrays
        executor: Any = StandInExecutor(functools.partial(score, acceptance=1.0), busy_s=0.0, note=self._note)
        self.driver = Driver(EngineCore(new_session_registry(), executor, clock=lambda: self.now_ns))
        self.texts, self.generations = {1: [7] * 5, 2: [8] * 5}, {1: 1, 2: 1}
        for number in self.texts:
            self.driver.send(open_session(number, prompt_length=5, max_length=1000, num_token_ids=VOCAB_SIZE))
            self.ask(number, [])
            self.run()
            self.now_ns += AWAY
            self.ask(number)
            self.run()
            self.now_ns += 2 * LONGEST_ABSENCE_NS  # no absence that counts

    def _note(self, what: int, items: Any) -> None:
        if what == ENDED:
            self.now_ns += FORWARD
            self.forwards.append(sum(len(getattr(item, "sessions", [0])) for item in items))

    def ask(self, number: int, drafts: Any = (1, 1, 1)) -> None:
        """Ask for the scores of a session's drafts, none of which are accepted."""
        text = self.texts[number]
        self.generations[number] += 1
        kept = len(text) - 1 if drafts else 0
        item = score_item(number, self.generations[number], text, drafts, num_kept_tokens=kept)
        commands: Any = (command_batch([item]),) if self.are_arrays and drafts else (item,)
        self.driver.core.handle(0, commands, arrived_ns=self.now_ns)

    def run(self) -> None:
        """Step until there is nothing to do or it waits; commit what is answered."""
        core = self.driver.core
        while core.has_work and not core.pause_s:
            for event in self.driver.step():
                self.texts[event.session].append(event.form.token_ids[0])


@pytest.fixture(params=[False, True], ids=["items", "arrays"])
def target(request: pytest.FixtureRequest) -> Target:
    """A target whose first session is away when its second one asks."""
    target = Target(are_arrays=request.param)
    target.ask(1)
    target.run()
    del target.forwards[:]
    target.now_ns += AWAY // 2
    target.ask(2)
    return target


def test_two_sessions_that_take_turns_become_one_group(target: Target) -> None:
    target.run()
    assert not target.forwards and target.driver.core.pause_s == pytest.approx(1e-9 * AWAY)  # until the first is late
    target.now_ns += AWAY // 2
    target.ask(1)
    target.run()
    assert target.forwards == [2]


def test_a_session_that_does_not_come_back_is_waited_for_once(target: Target) -> None:
    target.now_ns += AWAY
    target.run()
    assert target.forwards == [1]
