"""A long prompt, and that of a sole session, goes to a draft on the target's device after the first token: no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.ports import Extend
from outrider.types import AcceptanceMethod
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.speculation import (
    LONGEST_INLINE_FEED,
    LONGEST_PROMPT_AT_ONCE,
    ControlledSession,
    DraftLengthPolicy,
)
from tests.coordinator.driving import Driven
from tests.coordinator.setting import OTHER_ROWS, VOCAB_SIZE, Setting, own_tokens, plan_of

SHORT = tuple(index % VOCAB_SIZE for index in range(LONGEST_INLINE_FEED + 4))
LONG = tuple(index % VOCAB_SIZE for index in range(LONGEST_PROMPT_AT_ONCE + 1))


def begun(prompt: tuple[int, ...], *, shares_device: bool) -> tuple[Setting, Driven]:
    setting = Setting(draft_rows=OTHER_ROWS)
    setting.bench.facts = DraftFacts(shares_device=shares_device)
    return setting, setting.bench.add(plan_of(prompt=prompt))


@pytest.mark.parametrize(
    ("prompt", "shares_device", "goes_at_once"), [(LONG, True, False), (LONG, False, True), (LONG[1:], True, True)]
)
def test_when_the_draft_gets_the_prompt(prompt: tuple[int, ...], shares_device: bool, goes_at_once: bool) -> None:
    setting, driven = begun(prompt, shares_device=shares_device)
    assert any(isinstance(command, Extend) for command in setting.bench.to_draft) is goes_at_once
    setting.bench.round()
    assert len(driven.token_ids) == 1


def test_the_prompt_is_brought_before_the_first_proposal_is_asked_for() -> None:
    setting, driven = begun(LONG, shares_device=True)
    setting.bench.run()
    first, second, *_ = setting.extends
    assert (len(first.token_ids), first.draft_length) == (len(LONG) + 1, 0)
    assert (len(second.token_ids), second.draft_length) == (0, 4)
    assert driven.loop.spec_stats.num_drafts == len(driven.steps) - 1 - (driven.steps[-1].num_draft_tokens == 0)


@pytest.mark.parametrize("method", AcceptanceMethod)
@pytest.mark.parametrize("seed", range(4))
def test_tokens_and_proposals_are_those_of_a_draft_elsewhere(method: AcceptanceMethod, seed: int) -> None:
    found = []
    for shares_device in (False, True):
        setting = Setting(draft_rows=OTHER_ROWS)
        setting.bench.facts = DraftFacts(shares_device=shares_device)
        driven = setting.run(plan_of(prompt=LONG, method=method, seed=seed))
        assert setting.all_is_free()
        found.append((driven.token_ids, [step.num_draft_tokens for step in driven.steps]))
    assert found[0] == found[1]


class Known(DraftLengthPolicy):
    """A controlled policy under which speculation goes on, with what it was told of verdicts."""

    def __init__(self, *, is_alone: bool) -> None:
        super().__init__(4, is_controlled=True)
        self._is_alone = is_alone
        self.lags: list[int] = []

    def num_together(self, session: ControlledSession) -> int:
        return 1 if self._is_alone else 2

    def will_draft(self, session: ControlledSession, num_tokens: int) -> bool:
        return num_tokens <= LONGEST_PROMPT_AT_ONCE

    def length(self, session: ControlledSession) -> int:
        return 4

    def lengths(self, sessions: Sequence[ControlledSession]) -> list[int]:
        return [4] * len(sessions)

    def note_verdict(
        self, session: ControlledSession, num_drafted: int, num_accepted: int, *, num_uncomputed: int
    ) -> None:
        self.lags.append(num_uncomputed)


def sole(
    policy: DraftLengthPolicy | None, prompt: tuple[int, ...], *, shares_device: bool = True, max_tokens: int = 24
) -> Setting:
    setting = Setting(draft_rows=OTHER_ROWS)
    setting.bench.policy = policy or setting.bench.policy
    setting.bench.facts = DraftFacts(shares_device=shares_device)
    enter(setting, prompt, max_tokens=max_tokens)
    return setting


def enter(setting: Setting, prompt: tuple[int, ...], *, max_tokens: int = 24) -> Driven:
    """A session that lives on the target, as far as the policy knows."""
    bench, number = setting.bench, len(setting.bench.sessions) + 1
    plan = plan_of(prompt=prompt, temperature=0.0, max_tokens=max_tokens)
    driven = bench.sessions[number] = Driven(SessionLoop(plan, bench.policy, draft=bench.facts), number)
    bench.policy.enter(driven.loop.speculation, "target")
    driven.loop.start(number)
    bench.collect(driven)
    return driven


def is_at_once(setting: Setting) -> bool:
    return any(isinstance(command, Extend) for command in setting.bench.to_draft)


@pytest.mark.parametrize("is_chosen", [False, True])
def test_the_sole_session_on_a_device_has_its_first_token_before_its_draft_has_the_prompt(is_chosen: bool) -> None:
    policy = Known(is_alone=True) if is_chosen else None
    setting = sole(policy, SHORT)
    assert not is_at_once(setting)
    setting.bench.run()
    (driven,) = setting.bench.sessions.values()
    first, second, *_ = setting.extends
    assert (len(first.token_ids), first.draft_length) == (len(SHORT) + 1, 0)
    assert (len(second.token_ids), second.draft_length) == (0, 4)
    assert [step.num_draft_tokens for step in driven.steps[:2]] == [0, 4], "no plain step waits for the draft's text"
    assert driven.token_ids == own_tokens(plan_of(prompt=SHORT, temperature=0.0))
    if policy is not None:
        assert policy.lags[0] == 0, "the text is not for the controller to bring"


@pytest.mark.parametrize("is_chosen", [False, True])
def test_the_draft_has_the_prompt_at_once_on_a_device_of_its_own_and_beside_other_sessions(is_chosen: bool) -> None:
    def policy(*, is_alone: bool) -> Known | None:
        return Known(is_alone=is_alone) if is_chosen else None

    assert is_at_once(sole(policy(is_alone=True), SHORT, shares_device=False))
    setting = sole(policy(is_alone=False), SHORT)
    setting.bench.to_draft.clear()
    enter(setting, SHORT)
    assert is_at_once(setting)


def test_a_prompt_of_the_longest_that_goes_at_once_waits_too_where_the_session_is_alone() -> None:
    setting = sole(Known(is_alone=True), LONG[1:])
    assert not is_at_once(setting)
    setting.bench.run()
    assert [extend.draft_length for extend in setting.extends[:2]] == [0, 4]


@pytest.mark.parametrize("is_chosen", [False, True])
@pytest.mark.parametrize(("max_tokens", "asked"), [(2, []), (3, [0, 1]), (4, [0, 2])])
def test_the_prompt_is_brought_where_a_proposal_is_of_use(is_chosen: bool, max_tokens: int, asked: list[int]) -> None:
    """The first token comes without one, and so does the last."""
    setting = sole(Known(is_alone=True) if is_chosen else None, SHORT, max_tokens=max_tokens)
    assert not is_at_once(setting)
    setting.bench.run()
    assert [extend.draft_length for extend in setting.extends][:2] == asked
    (driven,) = setting.bench.sessions.values()
    assert driven.token_ids == own_tokens(plan_of(prompt=SHORT, temperature=0.0, max_tokens=max_tokens))


def test_a_session_whose_draft_is_back_does_not_wait_until_that_has_the_text() -> None:
    setting = sole(Known(is_alone=True), SHORT)
    bench, (driven,) = setting.bench, setting.bench.sessions.values()
    for _ in range(3):
        bench.round()
    bench.tell(driven, SessionLoop.draft_lost)
    setting.draft_core.sessions.clear()
    bench.round()
    bench.tell(driven, lambda loop: loop.draft_back(DraftFacts(shares_device=True)))
    num_steps = len(driven.steps)
    bench.run()
    drafted = [step.num_draft_tokens for step in driven.steps[num_steps:]]
    assert drafted[:2] == [0, 0] and max(drafted) > 0, "the step under way, and one while its text is brought"
    assert driven.token_ids == own_tokens(plan_of(prompt=SHORT, temperature=0.0))
