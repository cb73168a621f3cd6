"""A long prompt goes to a draft on the target's device after the first token, and changes nothing but that."""

from __future__ import annotations

import pytest

from outrider.ports import Extend
from outrider.types import AcceptanceMethod
from outrider_coordinator.session.service_state import DraftFacts
from outrider_coordinator.speculation import LONGEST_PROMPT_AT_ONCE
from tests.coordinator.driving import Driven
from tests.coordinator.setting import OTHER_ROWS, VOCAB_SIZE, Setting, plan_of

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
