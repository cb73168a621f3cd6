"""Steps that are planned before their draft tokens have come: nothing is different but when the work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import ScoreAhead, ScoreBatch
from outrider.ports import Prepare, Release, Scores
from outrider.types import AcceptanceMethod, SamplingParams
from tests.serving.decode.test_direct_answers import NUM_DRAFTS, NUM_SESSIONS, PROMPT_LENGTH, Caller
from tests.serving.decode.test_twins import NUM_TOKEN_IDS, target_core
from tests.serving.decode.twins import SAMPLED, TOKENS, Samplings, Switch, Twins
from tests.support.core_driver import open_session

COUPLED = ((SamplingParams(temperature=1.0), AcceptanceMethod.COUPLED),)


def ahead_of(batched: ScoreBatch) -> ScoreAhead:
    """Announcement sent before the draft tokens are there."""
    none = batched.draft_token_ids[:0]
    bare = replace(batched, draft_token_ids=none, support_counts=None, support_token_ids=None)
    return ScoreAhead(bare, 1, batched.generations)


def whole(ahead: ScoreAhead, batched: ScoreBatch) -> ScoreBatch:
    """Columns that are passed on when they are there."""
    counts, ids = batched.support_counts, batched.support_token_ids
    return ahead.with_proposals(batched.draft_token_ids, None if counts is None or ids is None else (counts, ids))


class ExpectingTwins(Twins):
    """All drafts come directly; one of both cores is told before, and sometimes something else comes first."""

    _is_nested = False

    def _deliver(self, commands: Sequence[Any]) -> None:
        batched = commands[0]
        if len(commands) > 1 or not isinstance(batched, ScoreBatch) or not batched.draft_token_ids.size:
            super()._deliver(commands)
            return
        ahead = ahead_of(batched)
        self.cores[0].expect(self._link_id, ahead.batched)
        if not self._is_nested:
            self._is_nested = True
            if self._chance(self._oddity / 4):
                self._drop_link()
            self._meanwhile()
            if self._chance(4 * self._oddity):
                super()._deliver([Release(10_000, self._new_generation())])
            self._step() if self._chance(0.3) else None
            self._is_nested = False
        super()._deliver([whole(ahead, batched)])


@pytest.mark.parametrize(
    ("seed", "num_pages", "samplings"),
    [
        pytest.param(0, 1200, TOKENS, marks=pytest.mark.integration),
        (1, 400, TOKENS),
        pytest.param(2, 1200, SAMPLED, marks=pytest.mark.integration),
        (3, 400, SAMPLED[1:2]),
        (4, 1200, COUPLED),
    ],
)
def test_a_target_that_plans_ahead_says_and_holds_the_same(seed: int, num_pages: int, samplings: Samplings) -> None:
    switch = Switch()
    expecting, executor = target_core(switch, takes_batch=True, num_pages=num_pages)
    other, unplanned = target_core(switch, takes_batch=True, num_pages=num_pages)
    twins = ExpectingTwins("target", expecting, other, switch, seed, num_token_ids=NUM_TOKEN_IDS, samplings=samplings)
    twins.run(80)
    assert executor.num_planned > 10, twins.outcomes
    assert executor.num_forgotten > 5, twins.outcomes
    assert unplanned.num_planned == 0
    assert twins.outcomes["SessionLost"] + twins.outcomes["SessionFailed"]
    for core in (expecting, other):
        assert core.num_pages_free == num_pages


class Expecting:
    """Sessions of a target that expects a step of them."""

    def __init__(self, temperature: float = 0.0) -> None:
        self.caller = caller = Caller("target", temperature=temperature)
        for _ in range(5):  # after which the next step takes a page of each
            caller.send(caller.batched(caller.items()))
            caller.run()
            caller.take()
        self.items = caller.items()
        self.batched: ScoreBatch = caller.batched(self.items)
        self.num_free = caller.core.num_pages_free
        self.ahead = ahead_of(self.batched)
        caller.core.expect(0, self.ahead.batched)
        assert caller.core.num_pages_free < self.num_free
        self.texts = [list(session.sequence.token_ids) for session in caller.core.sessions.sessions()]
        assert not caller.core.has_work

    @property
    def num_planned(self) -> int:
        found: int = type(self.caller.executor).num_planned
        return found

    def bring(self, batched: ScoreBatch | None = None) -> None:
        """The draft tokens come."""
        self.caller.send(whole(self.ahead, batched or self.batched))
        self.caller.run()

    def check_forgotten(self) -> None:
        """Nothing is left of what was planned."""
        core = self.caller.core
        assert core.num_pages_free == self.num_free
        assert [list(session.sequence.token_ids) for session in core.sessions.sessions()] == self.texts
        self.check_integrity()

    def check_integrity(self) -> None:
        """Pages and texts fit."""
        self.caller.executor.runner.sequences.check_integrity()

    def check_answered(self) -> None:
        """Each item that was brought is answered."""
        answers, events = self.caller.answered()
        found = [*events, *(event for each in answers for event in each.events(range(len(each.sessions))))]
        assert {(event.session, event.generation) for event in found if isinstance(event, Scores)} == {
            (item.session, item.generation) for item in self.items
        }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_that_comes_as_expected_is_launched_as_planned(temperature: float) -> None:
    expecting = Expecting(temperature)
    expecting.bring()
    assert expecting.num_planned == 1
    expecting.check_answered()
    expecting.check_integrity()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_some_rows_are_scored_without_the_others(temperature: float) -> None:
    expecting = Expecting(temperature)
    caller, whole_items = expecting.caller, expecting.items
    for rows in ([2, 0], [1, 3]):
        expecting.items = [whole_items[row] for row in rows]
        some: Any = caller.batched(expecting.items)
        counts, ids = some.support_counts, some.support_token_ids
        supports = None if counts is None or ids is None else (counts, ids)
        caller.send(expecting.ahead.selected(rows).with_proposals(some.draft_token_ids, supports))
        caller.run()
        expecting.check_answered()
    assert expecting.num_planned == 0
    expecting.check_integrity()


def test_a_session_that_ends_meanwhile_leaves_nothing_behind() -> None:
    expecting = Expecting()
    caller = expecting.caller
    caller.send(Release(0, caller.next_generation()))
    assert caller.core.num_sessions == NUM_SESSIONS - 1
    expecting.check_integrity()
    expecting.bring()
    assert expecting.num_planned == 0
    expecting.items = expecting.items[1:]
    expecting.check_answered()


@pytest.mark.parametrize(
    "send",
    [
        lambda caller: caller.core.drop_link(9),
        lambda caller: caller.core.end_idle_sessions(),
        lambda caller: caller.send(Prepare(0, 1, 3)),
        lambda caller: caller.send(Release(77, 1)),
    ],
    ids=["another link ends", "idle sessions end", "credit", "release of another session"],
)
def test_what_comes_first_takes_the_plan_back(send: Callable[[Caller], None]) -> None:
    expecting = Expecting()
    send(expecting.caller)
    expecting.check_forgotten()
    expecting.bring()
    assert expecting.num_planned == 0
    expecting.check_answered()


def test_the_end_of_the_link_frees_all_pages() -> None:
    expecting = Expecting()
    expecting.caller.core.drop_link(0)
    assert expecting.caller.core.num_pages_free == 600


def test_a_step_that_is_asked_for_anew_takes_the_plan_back() -> None:
    expecting = Expecting()
    again = expecting.caller.batched(expecting.items)  # by the coordinator: the same, but not what the channel brings
    expecting.caller.send(again)
    expecting.caller.run()
    assert expecting.num_planned == 0
    expecting.check_answered()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_tokens_that_are_none_take_the_plan_back(temperature: float) -> None:
    expecting = Expecting(temperature)
    wrong = expecting.batched.draft_token_ids.copy()
    wrong[0] = NUM_TOKEN_IDS + 5
    expecting.bring(replace(expecting.batched, draft_token_ids=wrong))
    assert expecting.num_planned == 0
    _, events = expecting.caller.answered()
    assert sorted(event.session for event in events) == [1, 2, 3]
    expecting.check_integrity()


def test_supports_that_are_missing_take_the_plan_back() -> None:
    expecting = Expecting(1.0)
    expecting.bring(replace(expecting.batched, support_counts=None, support_token_ids=None))
    assert expecting.num_planned == 0
    expecting.check_integrity()


def test_another_message_of_the_same_turn_takes_the_plan_back() -> None:
    expecting = Expecting()
    caller = expecting.caller
    caller.send(whole(expecting.ahead, expecting.batched))
    caller.send(Release(77, caller.next_generation()))
    expecting.check_integrity()
    caller.run()
    assert expecting.num_planned == 0
    expecting.check_answered()


def test_a_second_plan_takes_the_place_of_the_first() -> None:
    expecting = Expecting()
    num_free = expecting.caller.core.num_pages_free
    second = ahead_of(expecting.batched)
    second = replace(second, batched=replace(second.batched, generations=second.batched.generations.copy()))
    expecting.caller.core.expect(0, second.batched)
    assert expecting.caller.core.num_pages_free == num_free
    expecting.ahead = second
    expecting.bring()
    assert expecting.num_planned == 1
    expecting.check_answered()


def test_nothing_is_planned_while_a_forward_runs() -> None:
    caller = Caller("target")
    caller.postprocess()
    caller.send(caller.batched(caller.items()))
    caller.switch.is_on = False
    caller.step()
    num_free = caller.core.num_pages_free
    caller.core.expect(0, ahead_of(caller.batched(caller.items())).batched)
    assert caller.core.num_pages_free == num_free
    caller.switch.is_on = True
    caller.run()


@pytest.mark.parametrize("num_spare", [0, 3, 7])
def test_nothing_is_planned_that_may_want_for_pages(num_spare: int) -> None:
    caller = Caller("target")
    caller.postprocess()
    manager = caller.executor.runner.sequences
    other = manager.open(4 * manager.pool.num_free)
    manager.extend(other, [1] * (manager.pool.page_size * (manager.pool.num_free - num_spare)))
    items = caller.items()
    ahead = ahead_of(caller.batched(items))
    caller.core.expect(0, ahead.batched)
    assert caller.core.num_pages_free == num_spare
    manager.release(other)
    caller.send(whole(ahead, caller.batched(items)))
    caller.run()
    assert type(caller.executor).num_planned == 0
    _, events = caller.answered()
    assert not events  # pages are free again: the step is whole


def test_pages_of_a_plan_are_there_for_a_session_that_begins() -> None:
    expecting = Expecting()
    caller, core = expecting.caller, expecting.caller.core
    manager = caller.executor.runner.sequences
    other = manager.open(4 * manager.pool.num_free)
    length = 4 * PROMPT_LENGTH
    num_needed = length // manager.pool.page_size + 1
    manager.extend(other, [1] * (manager.pool.page_size * (expecting.num_free - num_needed - 4)))
    assert core.num_pages_free < num_needed + 4
    opening = open_session(
        9, prompt_length=length, max_length=200, generation=caller.next_generation(), num_token_ids=NUM_TOKEN_IDS
    )
    caller.send(opening)
    assert core.num_pages_free == num_needed + 4
    manager.release(other)
    caller.run()
    expecting.bring()
    expecting.check_answered()


def test_sessions_that_expect_no_drafts_are_not_planned() -> None:
    caller = Caller("target")
    caller.postprocess()
    batched = caller.batched(caller.items())
    lengths = np.array([NUM_DRAFTS, 0, NUM_DRAFTS, NUM_DRAFTS])
    num_free = caller.core.num_pages_free
    caller.core.expect(0, replace(ahead_of(batched).batched, draft_lengths=lengths))
    assert caller.core.num_pages_free == num_free
