"""Sessions whose draft lengths change from step to step: the same tokens, and a draft that is fed beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outrider.ports import Extend, Score
from outrider.types import AcceptanceMethod
from outrider_coordinator.speculation import LONGEST_INLINE_FEED, ControlledSession, DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft
from tests.coordinator.setting import Setting, mixed_rows, own_tokens, plan_of


class AtRandom(DraftLengthPolicy):
    """Any length in any step of any session, as if controlled."""

    def __init__(self, seed: int) -> None:
        super().__init__(8, is_controlled=True)
        self._random = np.random.default_rng(seed)

    def length(self, session: ControlledSession) -> int:
        return int(self._random.integers(0, session.limit + 1))

    def lengths(self, sessions: Sequence[ControlledSession]) -> list[int]:
        return [self.length(session) for session in sessions]

    def no_draft_reason(self, session: ControlledSession) -> WithoutDraft | None:
        return WithoutDraft.NOT_WORTH


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("method", "temperature"), [(AcceptanceMethod.REJECTION, 0.0), (AcceptanceMethod.COUPLED, 1.0)]
)
def test_greedy_and_coupled_tokens_are_equal_whatever_the_lengths(
    method: AcceptanceMethod, temperature: float, seed: int
) -> None:
    plans = [plan_of(seed=each, method=method, temperature=temperature, max_tokens=60) for each in range(4)]
    setting = Setting(draft_rows=mixed_rows)
    setting.bench.policy = AtRandom(seed)
    driven = [setting.bench.add(plan) for plan in plans]
    setting.bench.run()
    assert [each.token_ids for each in driven] == [own_tokens(plan) for plan in plans]
    lengths = {len(score.draft_token_ids) for score in setting.scores}
    assert len(lengths) > 5  # they did differ


def test_a_draft_that_lacks_much_is_fed_while_steps_go_on() -> None:
    setting = Setting()
    policy = setting.bench.policy = DraftLengthPolicy(8, is_controlled=True)
    prompt = tuple(index % 7 + 1 for index in range(LONGEST_INLINE_FEED + 5))
    driven = setting.bench.add(plan_of(prompt=prompt, max_tokens=20, temperature=0.0))
    setting.bench.turn_target()
    (score,) = [command for command in setting.bench.to_target if isinstance(command, Score)]
    assert not score.draft_token_ids  # the second step waits for no draft
    assert driven.loop.no_draft_reason is WithoutDraft.CATCHING_UP
    (extend,) = [command for command in setting.bench.to_draft if isinstance(command, Extend)]
    assert (extend.num_kept_tokens, extend.draft_length) == (0, 0)
    session = driven.loop.speculation
    policy.enter(session, "target")
    session.has_begun, session.draft_lag = True, len(prompt)
    setting.bench.turn_draft()
    assert session.draft_lag <= 1  # at once, not with the next verdict
    policy.leave(session)
    setting.bench.run()
    assert any(extend.draft_length == policy.length(driven.loop.speculation) for extend in setting.extends[1:])
    assert driven.loop.spec_stats.num_draft_tokens > 0
    assert driven.token_ids == own_tokens(driven.loop.engine_request)


class _CatchingUp(DraftLengthPolicy):
    """Drafts are to be brought their text."""

    is_begun = False

    def length(self, session: ControlledSession) -> int:
        return 0

    def is_catching_up(self, session: ControlledSession) -> bool:
        return self.is_begun


@pytest.mark.parametrize("num_lacked", [LONGEST_INLINE_FEED, LONGEST_INLINE_FEED + 5])
def test_a_draft_is_brought_long_text_beside_the_step_under_way(num_lacked: int) -> None:
    setting = Setting()
    policy = setting.bench.policy = _CatchingUp(8, is_controlled=True)
    prompt = tuple(index % 7 + 1 for index in range(num_lacked - 1))
    driven = setting.bench.add(plan_of(prompt=prompt, max_tokens=20, temperature=0.0))
    setting.bench.turn_target()
    assert not setting.extends
    policy.is_begun = True
    for _ in range(2):  # once
        setting.bench.tell(driven, lambda loop: loop.bring_text())
    extends = [command for command in setting.bench.to_draft if isinstance(command, Extend)]
    assert [extend.draft_length for extend in extends] == [0] * (num_lacked > LONGEST_INLINE_FEED)
    policy.is_begun = False
    setting.bench.run()
    assert driven.token_ids == own_tokens(driven.loop.engine_request)


def test_fixed_lengths_wait_for_the_draft_to_take_the_prompt_in() -> None:
    setting = Setting()
    prompt = tuple(index % 7 + 1 for index in range(LONGEST_INLINE_FEED + 5))
    driven = setting.bench.add(plan_of(prompt=prompt, max_tokens=20, temperature=0.0))
    setting.bench.turn_target()
    assert not setting.bench.to_target
    setting.bench.run()
    assert WithoutDraft.CATCHING_UP not in driven.loop.spec_stats.without_draft
