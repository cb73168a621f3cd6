"""Credit for plain steps: sent for sessions that will decode without drafts, renewed in time, and only then."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from outrider.ports import Open, Prepare, Score
from outrider_coordinator.session.steps import LOOKAHEAD_STEPS
from outrider_coordinator.speculation import ControlledSession, DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft
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


class _SoonToDraft(DraftLengthPolicy):
    """Sessions that will draft once ``is_held_back`` is over."""

    is_held_back = True

    def length(self, session: ControlledSession) -> int:
        return 0 if self.is_held_back else super().length(session)

    def no_draft_reason(self, session: ControlledSession) -> WithoutDraft | None:
        return WithoutDraft.PROMPTS if self.is_held_back else super().no_draft_reason(session)


def test_a_session_that_waits_for_others_prompts_is_prepared_once_that_takes_many_steps() -> None:
    """Steps computed ahead when it begins to draft would delay all others."""
    setting = Setting()
    policy = setting.bench.policy = _SoonToDraft(4, is_controlled=True)
    driven = setting.bench.add(plan_of(max_tokens=60))
    driven.loop.speculation.has_ever_drafted = True
    for _ in range(6):
        setting.bench.round()
    assert len(_commands(setting)) > 5
    assert not any(isinstance(command, Prepare) for command in _commands(setting))
    for _ in range(6):
        setting.bench.round()
    assert sum(isinstance(command, Prepare) for command in _commands(setting)) == 1
    policy.is_held_back = False
    setting.bench.run()
    assert any(score.draft_token_ids for score in setting.scores)


def test_a_session_of_a_burst_is_prepared_beside_the_bursts_prompts() -> None:
    """All of a burst are ahead together until the first of them drafts."""
    setting = Setting()
    policy = setting.bench.policy = _SoonToDraft(4, is_controlled=True)
    setting.bench.add(plan_of(max_tokens=60))
    for _ in range(3):
        setting.bench.round()
    assert sum(isinstance(command, Prepare) for command in _commands(setting)) == 1
    policy.is_held_back = False
    setting.bench.run()
    assert any(score.draft_token_ids for score in setting.scores)


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
