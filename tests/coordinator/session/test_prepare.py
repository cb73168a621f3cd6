"""Credit for plain steps: sent for sessions that will decode without drafts, renewed in time, and only then."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from outrider.ports import Open, Prepare, Score
from outrider_coordinator.session.steps import LOOKAHEAD_STEPS
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.setting import Setting, plan_of


def _commands(setting: Setting) -> list[Any]:
    return [command for command in setting.bench.sent_to_target if isinstance(command, Open | Score | Prepare)]


def _check_each_follows_its_score(setting: Setting) -> None:
    commands = _commands(setting)
    for before, command in itertools.pairwise(commands):
        if isinstance(command, Prepare):
            assert isinstance(before, Score)
            assert (command.session, command.generation) == (before.session, before.generation)
            assert not before.draft_token_ids


def test_a_session_without_a_draft_is_prepared_with_its_prompt() -> None:
    setting = Setting(has_draft=False)
    setting.bench.policy = DraftLengthPolicy(4, has_draft=False)
    setting.run(plan_of(max_tokens=24))
    assert [type(command) for command in _commands(setting)[:4]] == [Open, Score, Prepare, Score]
    assert sum(isinstance(command, Prepare) for command in _commands(setting)) == 1
    _check_each_follows_its_score(setting)


def test_credit_is_renewed_before_it_ends() -> None:
    setting = Setting(has_draft=False)
    setting.run(plan_of(max_tokens=3 * LOOKAHEAD_STEPS))
    credit = 0
    for command in _commands(setting)[2:]:
        if isinstance(command, Prepare):
            assert credit == 0 or credit > 2
            credit = command.num_steps
        elif isinstance(command, Score):
            credit -= 1
            assert credit >= 0
    assert sum(isinstance(command, Prepare) for command in _commands(setting)) >= 4
    _check_each_follows_its_score(setting)


def test_a_session_that_drafts_is_not_prepared() -> None:
    setting = Setting()
    setting.run(plan_of())
    *most, _ = setting.scores
    assert all(score.draft_token_ids or not score.num_kept_tokens for score in most)
    assert not any(isinstance(command, Prepare) for command in _commands(setting))


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_last_step_is_not_prepared_for(max_tokens: int) -> None:
    setting = Setting(has_draft=False)
    setting.run(plan_of(max_tokens=max_tokens))
    assert sum(isinstance(command, Prepare) for command in _commands(setting)) == max_tokens - 1


def test_a_session_whose_draft_goes_is_prepared_and_one_that_drafts_again_anew() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=60))
    setting.bench.round()
    setting.bench.round()
    assert not any(isinstance(command, Prepare) for command in _commands(setting))
    for _ in range(2):
        setting.bench.tell(driven, lambda loop: loop.draft_lost())
        setting.bench.round()
        setting.bench.tell(driven, lambda loop: loop.draft_back(loop.draft.facts))
        setting.bench.round()
        setting.bench.round()
    assert sum(isinstance(command, Prepare) for command in _commands(setting)) == 2
    _check_each_follows_its_score(setting)


def test_a_rebuilt_session_is_given_credit_again() -> None:
    setting = Setting(has_draft=False)
    driven = setting.bench.add(plan_of())
    for _ in range(3):
        setting.bench.round()
    setting.target.faults.lose = 1
    setting.bench.run()
    assert driven.loop.spec_stats.num_target_rebuilds == 1
    kinds = [type(command) for command in _commands(setting)]
    again = kinds.index(Open, 1)
    assert kinds[again : again + 3] == [Open, Score, Prepare]
