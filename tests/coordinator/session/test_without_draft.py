"""Every step that has no proposal says why, and rebuilds and judged tokens are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.ports import Proposal
from outrider.types import AcceptanceMethod
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft
from tests.coordinator.driving import Driven
from tests.coordinator.setting import OTHER_ROWS, Setting, plan_of


def reasons(driven: Driven) -> dict[WithoutDraft, int]:
    """Reasons besides the first prefill, which every session has."""
    spec_stats = driven.loop.spec_stats
    assert sum(spec_stats.without_draft.values()) + spec_stats.num_drafts == spec_stats.num_steps
    assert spec_stats.without_draft[WithoutDraft.PREFILL] == 1 + spec_stats.num_target_rebuilds
    return {reason: count for reason, count in spec_stats.without_draft.items() if reason is not WithoutDraft.PREFILL}


def one_at_a_time(plan: EngineRequest) -> int:
    """Steps after the prefill when none drafts."""
    return plan.max_tokens - 1


def test_a_request_that_wants_none() -> None:
    plan = plan_of(num_speculative_tokens=0)
    assert reasons(Setting().run(plan)) == {WithoutDraft.NOT_ASKED: one_at_a_time(plan)}


def test_a_coordinator_without_a_draft_wants_none() -> None:
    setting, plan = Setting(has_draft=False), plan_of(num_speculative_tokens=4)
    setting.bench.policy = DraftLengthPolicy(4, has_draft=False)
    assert reasons(setting.run(plan)) == {WithoutDraft.NOT_ASKED: one_at_a_time(plan)}


def test_a_draft_that_is_not_there() -> None:
    plan = plan_of()
    driven = Setting(has_draft=False).run(plan)
    assert reasons(driven) == {WithoutDraft.AWAY: one_at_a_time(plan) - 1, WithoutDraft.LAST_TOKEN: 1}


def test_the_last_token_needs_no_draft() -> None:
    assert reasons(Setting().run(plan_of(max_tokens=2))) == {WithoutDraft.LAST_TOKEN: 1}


def test_load() -> None:
    setting = Setting(disable_by_batch_size=1)
    setting.bench.policy.num_requests = 1
    plan = plan_of()
    driven = setting.run(plan)
    assert reasons(driven) == {WithoutDraft.LOAD: one_at_a_time(plan)}


def test_a_text_as_long_as_the_draft_can_take() -> None:
    setting = Setting()
    setting.bench.facts = DraftFacts(max_length=3)
    plan = plan_of()
    assert reasons(setting.run(plan)) == {
        WithoutDraft.OUTGROWN: one_at_a_time(plan) - 1,
        WithoutDraft.LAST_TOKEN: 1,
    }


def test_a_late_draft_is_late_until_it_answers() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=12))
    setting.bench.round()
    setting.bench.draft_answers = False
    setting.bench.round()
    setting.bench.time_out()
    setting.bench.run()
    assert reasons(driven) == {WithoutDraft.LATE: 10, WithoutDraft.LAST_TOKEN: 1}
    assert driven.loop.spec_stats.num_draft_timeouts == 1


def test_a_draft_without_room() -> None:
    setting = Setting()
    setting.draft.faults.refuse = 1
    plan = plan_of(max_tokens=12)
    driven = setting.run(plan)
    assert reasons(driven) == {WithoutDraft.REFUSED: 10, WithoutDraft.LAST_TOKEN: 1}
    assert driven.loop.spec_stats.num_draft_rebuilds == 0


def test_a_session_that_failed_on_the_draft() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=12))
    setting.bench.round()
    setting.draft.faults.fail = 1
    setting.bench.run()
    assert reasons(driven) == {WithoutDraft.FAILED: 10, WithoutDraft.LAST_TOKEN: 1}


def test_a_session_lost_again_and_again() -> None:
    setting = Setting()
    setting.draft.faults.lose = 10_000
    driven = setting.run(plan_of(max_tokens=12))
    assert reasons(driven) == {WithoutDraft.LOST: 10, WithoutDraft.LAST_TOKEN: 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": (), "evidence": None}, WithoutDraft.NOTHING_PROPOSED),
        ({"base_length": 0}, WithoutDraft.BAD_EVIDENCE),
    ],
)
def test_a_proposal_that_is_none(change: dict[str, Any], reason: WithoutDraft) -> None:
    setting = Setting()
    setting.bench.change_draft_events = lambda events: [
        replace(event, **change) if isinstance(event, Proposal) and event.token_ids else event for event in events
    ]
    driven = setting.run(plan_of(max_tokens=12))
    assert reasons(driven) == {reason: 10, WithoutDraft.LAST_TOKEN: 1}


def test_a_draft_that_went_and_came_back_is_rebuilt_once() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=40, method=AcceptanceMethod.COUPLED))
    setting.bench.round()
    setting.bench.round()
    setting.bench.to_draft.clear()
    setting.draft_core.release_all()
    setting.bench.tell(driven, SessionLoop.draft_lost)
    for _ in range(3):
        setting.bench.turn_target()
    setting.bench.tell(driven, lambda loop: loop.draft_back(DraftFacts()))
    setting.bench.run()
    assert reasons(driven)[WithoutDraft.AWAY] == 4  # the step it was lost in, and three more
    assert (driven.loop.spec_stats.num_draft_rebuilds, driven.loop.spec_stats.num_target_rebuilds) == (1, 0)


def test_a_session_the_target_lost_is_rebuilt_by_a_prefill() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=40))
    for _ in range(3):
        setting.bench.round()
    setting.target.faults.lose = 1
    setting.bench.run()
    assert driven.loop.spec_stats.num_target_rebuilds == 1
    # The step in which it was lost keeps its proposal, so no second prefill is without one.
    assert driven.loop.spec_stats.without_draft[WithoutDraft.PREFILL] == 1
    first, rebuilt = (step for step in driven.steps if step.is_prefill)
    assert (first.number, first.num_draft_tokens) == (1, 0)
    assert rebuilt.num_draft_tokens > 0


def test_judged_tokens_end_with_a_steps_first_rejection() -> None:
    setting = Setting(draft_rows=OTHER_ROWS)
    spec_stats = setting.run(plan_of(max_tokens=60)).loop.spec_stats
    num_rejections = spec_stats.num_judged_tokens - spec_stats.num_accepted_tokens
    assert 0 < num_rejections < spec_stats.num_drafts
    assert spec_stats.num_judged_tokens < spec_stats.num_draft_tokens
    whole = Setting(draft_length=3).run(plan_of(max_tokens=21, method=AcceptanceMethod.COUPLED)).loop.spec_stats
    assert whole.num_judged_tokens == whole.num_accepted_tokens == whole.num_draft_tokens > 0
