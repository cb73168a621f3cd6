"""The state machine of one session when a service is late, lost, full, wrong or failing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.errors import InvalidRequestError, NonFiniteLogitsError, ProtocolError, UnavailableError
from outrider.ports import (
    Open,
    Proposal,
    Refused,
    Score,
    Scores,
    SessionFailed,
    SessionLost,
)
from outrider.types import (
    AcceptanceMethod,
    SparseEvidence,
    TokenScores,
)
from outrider_coordinator.session.actions import Fail, Finish
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.readiness import MAX_LOSSES_ALONE, MAX_LOSSES_IN_A_ROW
from outrider_coordinator.session.state import SessionStatus
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft
from tests.coordinator.driving import Driven
from tests.coordinator.setting import OTHER_ROWS, VOCAB_SIZE, Setting, own_tokens, plan_of

# A draft that is late, lost, full or wrong.


def silence_draft(setting: Setting, plan: EngineRequest) -> Driven:
    """A session in the middle, whose draft has been asked and stays silent past its time."""
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.bench.draft_answers = False
    setting.bench.round()
    assert driven.loop.status is SessionStatus.DRAFTING
    setting.bench.time_out()
    return driven


def test_a_late_draft_costs_no_tokens_and_is_not_asked_again_before_it_answers() -> None:
    setting, plan = Setting(), plan_of(max_tokens=40, method=AcceptanceMethod.COUPLED)
    driven = silence_draft(setting, plan)
    num_asked = len(setting.extends)
    for _ in range(6):
        setting.bench.round()
    assert len(setting.extends) == num_asked
    assert driven.loop.spec_stats.num_draft_timeouts == 1
    assert len(driven.token_ids) >= 6
    setting.bench.draft_answers = True
    setting.bench.deliver_draft(setting.bench.late)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)


def test_a_late_reply_says_what_the_draft_holds() -> None:
    setting = Setting()
    driven = silence_draft(setting, plan_of(max_tokens=40))
    late = setting.extends[-1]
    for _ in range(3):
        setting.bench.round()
    setting.bench.draft_answers = True
    setting.bench.deliver_draft(setting.bench.late)
    setting.bench.run()
    following = setting.extends[setting.extends.index(late) + 1]
    assert following.num_kept_tokens == late.num_kept_tokens + len(late.token_ids)
    assert len(following.token_ids) == 4  # what was emitted meanwhile
    assert driven.loop.spec_stats.num_draft_losses == 0
    assert sum(isinstance(command, Open) for command in setting.bench.sent_to_draft) == 1


def test_a_late_proposal_is_not_judged() -> None:
    setting = Setting()
    driven = silence_draft(setting, plan_of(max_tokens=40))
    setting.bench.deliver_draft(setting.bench.late)  # before the scores of the step that went without it
    setting.bench.turn_target()
    assert setting.scores[-1].draft_token_ids == ()
    assert driven.loop.spec_stats.num_drafts == 0


def test_a_draft_still_at_its_prefill_is_waited_for_and_then_asked() -> None:
    setting = Setting()
    setting.bench.draft_answers = False
    driven = setting.bench.add(plan_of())
    setting.bench.round()
    assert driven.loop.status is SessionStatus.DRAFTING
    assert driven.timer is not None
    assert len(setting.extends) == 1
    setting.bench.draft_answers = True
    setting.bench.deliver_draft(setting.bench.late)
    assert driven.loop.status is SessionStatus.DRAFTING
    setting.bench.run()
    assert driven.loop.spec_stats.num_drafts > 0
    assert driven.loop.spec_stats.num_draft_timeouts == 0


def test_a_timer_of_an_earlier_step_rings_for_nobody() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of())
    setting.bench.round()
    old = driven.timer
    assert old is not None
    setting.bench.round()
    setting.bench.tell(driven, lambda loop: loop.draft_timed_out(old))
    assert driven.loop.spec_stats.num_draft_timeouts == 0


def test_stale_replies_change_nothing() -> None:
    plan = plan_of(max_tokens=40, seed=4)
    expected = Setting(draft_rows=OTHER_ROWS).run(plan).token_ids
    setting = Setting(draft_rows=OTHER_ROWS)
    setting.target.faults.stale = setting.draft.faults.stale = True
    driven = setting.run(plan)
    assert driven.token_ids == expected
    assert driven.loop.spec_stats.num_stale_replies > 10


@pytest.mark.parametrize("rounds", range(5))
def test_a_draft_lost_halfway_and_back(rounds: int) -> None:
    setting, plan = Setting(), plan_of(max_tokens=60, method=AcceptanceMethod.COUPLED, seed=2)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.bench.to_draft.clear()
    setting.draft_core.release_all()
    setting.bench.tell(driven, SessionLoop.draft_lost)
    for _ in range(4):
        setting.bench.turn_target()
        assert not setting.bench.to_draft
    setting.bench.tell(driven, lambda loop: loop.draft_back(DraftFacts()))
    num_before = len(setting.extends)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)
    assert setting.extends[num_before].num_kept_tokens == 0
    assert setting.extends[-1].draft_length > 0
    assert driven.loop.spec_stats.num_draft_losses == 0


def test_a_draft_lost_while_its_proposal_is_judged_changes_nothing() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(seed=1))
    setting.bench.round()
    setting.bench.turn_draft()
    assert setting.bench.to_target[-1].draft_token_ids
    setting.bench.tell(driven, SessionLoop.draft_lost)
    setting.bench.run()
    assert driven.loop.spec_stats.num_drafts == 1
    assert len(driven.token_ids) == 24


def test_a_session_the_draft_lost_is_rebuilt_within_the_step() -> None:
    setting, plan = Setting(), plan_of(max_tokens=40, seed=8)
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.bench.round()
    setting.draft.faults.lose = 1
    setting.bench.run()
    assert driven.loop.spec_stats.num_draft_losses == 1
    assert driven.token_ids == Setting().run(plan).token_ids  # the same draft lengths, so the same tokens
    opens = [command for command in setting.bench.sent_to_draft if isinstance(command, Open)]
    assert len(opens) == 2
    assert opens[1].generation > opens[0].generation


def test_a_draft_that_loses_the_session_again_and_again_is_left_alone_for_a_while() -> None:
    setting, plan = Setting(), plan_of(max_tokens=30, method=AcceptanceMethod.COUPLED)
    setting.draft.faults.lose = 10_000
    driven = setting.run(plan)
    assert driven.token_ids == own_tokens(plan)
    assert driven.loop.spec_stats.num_draft_losses == MAX_LOSSES_IN_A_ROW + 1
    assert len(driven.retries) == 1


def lose_what_the_draft_was_asked(driven: Driven, setting: Setting) -> None:
    """The draft cannot read what an item refers to; its service holds the session yet."""
    asked = driven.loop.draft.asked
    assert asked is not None
    setting.bench.to_draft.clear()
    setting.bench.deliver_draft([SessionLost(driven.session, asked.generation, "the plane of this tensor is closed")])


def test_a_session_that_ends_after_its_draft_lost_it_leaves_nothing_open_there() -> None:
    setting = Setting()
    driven = silence_draft(setting, plan_of(max_tokens=40))
    assert driven.loop.status is SessionStatus.SCORING
    lose_what_the_draft_was_asked(driven, setting)
    setting.bench.tell(driven, SessionLoop.cancel)
    setting.bench.run()
    assert setting.all_is_free()


def test_a_draft_that_is_left_alone_holds_nothing_of_the_session() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=40))
    setting.bench.round()
    assert setting.draft_core.sessions
    while not driven.retries:
        lose_what_the_draft_was_asked(driven, setting)
    setting.bench.turn_draft()
    assert not setting.draft_core.sessions


def test_a_refusal_of_what_was_opened_before_is_stale() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=40))
    setting.bench.round()
    opened = driven.loop.draft.opened
    lose_what_the_draft_was_asked(driven, setting)
    assert driven.loop.draft.opened > opened
    setting.bench.deliver_draft([Refused(driven.session, opened, 20, "there is no room")])
    assert not driven.retries
    assert driven.loop.spec_stats.num_stale_draft_replies == 1
    setting.bench.run()
    assert driven.loop.spec_stats.num_drafts > 3


def test_a_draft_without_room_is_tried_again_when_told() -> None:
    setting, plan = Setting(), plan_of(max_tokens=40)
    setting.draft.faults.refuse = 1
    driven = setting.bench.add(plan)
    for _ in range(3):
        setting.bench.round()
    assert [retry.retry_after_ms for retry in driven.retries] == [20]
    assert len(setting.extends) == 1
    setting.bench.tell(driven, lambda loop: loop.draft_back(DraftFacts()))
    setting.bench.run()
    assert driven.loop.spec_stats.num_drafts > 3


def test_a_session_that_failed_on_the_draft_goes_on_without() -> None:
    setting, plan = Setting(), plan_of(method=AcceptanceMethod.COUPLED)
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.draft.faults.fail = 1
    setting.bench.tell(driven, lambda loop: loop.draft_back(DraftFacts()))
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)
    assert driven.loop.spec_stats.num_drafts == 0


Change = Callable[[Proposal], Proposal]


def spoil(change: Change) -> Callable[[list[Any]], list[Any]]:
    def changed(events: list[Any]) -> list[Any]:
        return [change(e) if isinstance(e, Proposal) and e.token_ids else e for e in events]

    return changed


def scale(proposal: Proposal) -> Proposal:
    assert isinstance(proposal.evidence, SparseEvidence)
    return replace(proposal, evidence=replace(proposal.evidence, probs=proposal.evidence.probs * np.float32(1.01)))


@pytest.mark.parametrize(
    "change",
    [
        scale,
        lambda proposal: replace(proposal, evidence=None),
        lambda proposal: replace(proposal, token_ids=(VOCAB_SIZE, *proposal.token_ids[1:])),
        lambda proposal: replace(proposal, token_ids=proposal.token_ids[:-1]),
        lambda proposal: replace(proposal, base_length=proposal.base_length - 1),
    ],
    ids=["sum", "none", "id", "count", "base"],
)
def test_bad_evidence_means_no_drafts_for_the_step_and_a_counter(change: Change) -> None:
    setting, plan = Setting(), plan_of(seed=6)
    setting.bench.change_draft_events = spoil(change)
    driven = setting.run(plan)
    assert driven.token_ids == own_tokens(plan)
    assert driven.loop.spec_stats.num_bad_evidence > 3
    assert driven.loop.spec_stats.num_drafts == 0


def test_fewer_tokens_than_asked_for_and_none_are_fine() -> None:
    for kept in (0, 2):
        setting, plan = Setting(), plan_of(method=AcceptanceMethod.COUPLED)
        setting.bench.change_draft_events = spoil(
            lambda proposal, kept=kept: replace(proposal, token_ids=proposal.token_ids[:kept])  # type: ignore[misc]
        )
        driven = setting.run(plan)
        assert driven.token_ids == own_tokens(plan)
        assert driven.loop.spec_stats.num_bad_evidence == 0
        assert set(driven.loop.spec_stats.draft_lengths) == ({kept, 1} if kept else set())


# A target that loses sessions, has no room, or fails.


@pytest.mark.parametrize("rounds", range(4))
def test_a_session_the_target_lost_is_rebuilt_and_no_token_is_lost_or_repeated(rounds: int) -> None:
    plan = plan_of(max_tokens=40, seed=8)
    setting = Setting(draft_rows=OTHER_ROWS)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.target.faults.lose = 1
    setting.bench.run()
    assert driven.token_ids == Setting(draft_rows=OTHER_ROWS).run(plan).token_ids
    assert driven.loop.spec_stats.num_target_losses == 1
    rebuilt = [score for score in setting.scores if score.num_kept_tokens == 0]
    assert len(rebuilt) == 2
    assert len(rebuilt[1].token_ids) >= 3


def test_losses_in_a_row_fail_the_request() -> None:
    setting = Setting()
    setting.target.faults.lose = 10_000
    driven = setting.run(plan_of())
    assert isinstance(driven.ending, Fail)
    assert isinstance(driven.ending.error, UnavailableError)
    assert len(setting.scores) == MAX_LOSSES_IN_A_ROW + 1


def test_a_request_that_fails_by_its_losses_leaves_nothing_open() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of())
    setting.bench.round()
    while driven.ending is None:
        setting.bench.turn_draft()
        setting.bench.to_target.clear()
        asked = driven.loop.target.asked
        assert asked is not None
        setting.bench.deliver_target([SessionLost(driven.session, asked, "another text")])
    setting.bench.run()
    assert setting.all_is_free()


def test_losses_with_answers_between_do_not_add_up() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=60))
    for _ in range(3 * MAX_LOSSES_IN_A_ROW):
        setting.target.faults.lose = 1
        setting.bench.round()
        setting.bench.round()
        setting.bench.round()
    setting.bench.run()
    assert isinstance(driven.ending, Finish)
    assert driven.loop.spec_stats.num_target_losses > MAX_LOSSES_IN_A_ROW


@pytest.mark.parametrize("rounds", range(4))
def test_a_target_lost_and_back(rounds: int) -> None:
    plan = plan_of(max_tokens=40, seed=8)
    setting = Setting(draft_rows=OTHER_ROWS)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.bench.turn_draft()
    setting.bench.to_target.clear()
    setting.target_core.release_all()
    setting.bench.tell(driven, SessionLoop.target_lost)
    setting.bench.turn_draft()
    assert not setting.bench.to_target
    setting.bench.tell(driven, SessionLoop.target_back)
    setting.bench.run()
    assert driven.token_ids == Setting(draft_rows=OTHER_ROWS).run(plan).token_ids
    rebuilds = driven.loop.spec_stats.num_target_rebuilds
    assert [step.is_prefill for step in driven.steps].count(True) == 1 + rebuilds


def test_a_request_over_which_targets_break_is_given_up() -> None:
    setting = Setting(draft_rows=OTHER_ROWS)
    driven = setting.bench.add(plan_of(max_tokens=40, seed=8))
    for loss in range(MAX_LOSSES_IN_A_ROW + MAX_LOSSES_ALONE + 1):
        assert driven.loop.status is SessionStatus.SCORING, loss
        assert driven.loop.is_suspect == (loss > MAX_LOSSES_IN_A_ROW)
        setting.bench.to_target.clear()
        setting.target_core.release_all()
        setting.bench.tell(driven, SessionLoop.target_lost)
        setting.bench.tell(driven, SessionLoop.target_back)
    assert driven.loop.status is SessionStatus.FINISHED


def test_a_session_that_waits_for_its_draft_is_not_what_targets_break_over() -> None:
    setting, plan = Setting(), plan_of(method=AcceptanceMethod.COUPLED)
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.bench.draft_answers = False
    setting.bench.round()
    for _ in range(MAX_LOSSES_IN_A_ROW + MAX_LOSSES_ALONE + 1):
        assert driven.loop.status is SessionStatus.DRAFTING
        setting.target_core.release_all()
        setting.bench.tell(driven, SessionLoop.target_lost)
        assert not driven.loop.is_suspect
        setting.bench.tell(driven, SessionLoop.target_back)
    setting.bench.draft_answers = True
    setting.bench.deliver_draft(setting.bench.late)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)


def test_a_target_without_room_parks_the_session_and_the_draft_is_released() -> None:
    setting, plan = Setting(), plan_of(seed=3)
    setting.target.faults.refuse = 1
    driven = setting.run(plan)
    assert [park.retry_after_ms for park in driven.parked] == [20]
    assert driven.loop.status is SessionStatus.WAITING
    assert setting.all_is_free()
    assert not driven.token_ids
    setting.bench.sessions[77] = driven
    setting.bench.tell(driven, lambda loop: loop.start(77))
    setting.bench.run()
    assert driven.token_ids == Setting().run(plan).token_ids
    assert setting.all_is_free()


@pytest.mark.parametrize("method", [AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED])
@pytest.mark.parametrize("on_draft", [False, True])
@pytest.mark.parametrize("rounds", range(6))
def test_a_target_that_needs_the_pages_parks_the_session_wherever_it_is(
    rounds: int, on_draft: bool, method: AcceptanceMethod
) -> None:
    """Greedy where acceptance is by rejection: what is sampled there depends on the draft lengths."""
    temperature = 0.0 if method is AcceptanceMethod.REJECTION else 1.0
    setting, plan = Setting(), plan_of(method=method, temperature=temperature)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.target.faults.preempt = 1
    setting.draft.faults.preempt = int(on_draft)
    setting.bench.run()
    assert [park.retry_after_ms for park in driven.parked] == [20]
    assert driven.loop.status is SessionStatus.WAITING
    assert setting.all_is_free()
    so_far = list(driven.token_ids)
    setting.bench.sessions[77] = driven
    setting.bench.tell(driven, lambda loop: loop.start(77))
    (rebuild,) = [command for command in setting.bench.to_target if isinstance(command, Score)]
    assert rebuild.token_ids == (1, 2, 3, *so_far)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)
    assert driven.loop.spec_stats.num_draft_losses == 0  # it was opened anew before anything was asked of it
    assert setting.all_is_free()


@pytest.mark.parametrize("rounds", range(6))
def test_a_draft_that_needs_the_pages_is_asked_again_later(rounds: int) -> None:
    setting, plan = Setting(), plan_of(method=AcceptanceMethod.COUPLED)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.draft.faults.preempt = 1
    setting.bench.run()
    assert not driven.parked
    assert driven.token_ids == own_tokens(plan)
    assert driven.loop.spec_stats.without_draft[WithoutDraft.REFUSED] or rounds == 0
    assert setting.all_is_free()


def test_a_refusal_at_a_rebuild_keeps_the_tokens() -> None:
    setting, plan = Setting(), plan_of(method=AcceptanceMethod.COUPLED)
    driven = setting.bench.add(plan)
    for _ in range(3):
        setting.bench.round()
    so_far = list(driven.token_ids)
    assert so_far
    setting.target.faults.lose = setting.target.faults.refuse = 1
    setting.bench.run()
    assert driven.parked
    setting.bench.sessions[78] = driven
    setting.bench.tell(driven, lambda loop: loop.start(78))
    (rebuild,) = [command for command in setting.bench.to_target if isinstance(command, Score)]
    assert rebuild.token_ids == (1, 2, 3, *so_far)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)


def test_a_session_that_failed_on_the_target_fails_with_its_error_and_frees_both() -> None:
    setting = Setting()
    setting.target.faults.fail = 1
    driven = setting.run(plan_of())
    assert isinstance(driven.ending, Fail)
    assert isinstance(driven.ending.error, NonFiniteLogitsError)
    assert setting.all_is_free()


@pytest.mark.parametrize(
    ("event", "error", "field"),
    [
        (("InvalidRequestError", "logit_bias: all masked", "logit_bias"), InvalidRequestError, "logit_bias"),
        (("NoSuchError", "what", ""), ProtocolError, ""),
        (("annotations", "what", ""), ProtocolError, ""),
    ],
)
def test_failures_become_the_error_they_name(event: tuple[str, str, str], error: type, field: str) -> None:
    setting = Setting(has_draft=False)
    driven = setting.bench.add(plan_of())
    code, message, name = event
    driven.loop.on_target_event(SessionFailed(driven.session, 2, code, message, name))
    setting.bench.collect(driven)
    assert isinstance(driven.ending, Fail)
    assert type(driven.ending.error) is error
    assert driven.ending.error.field == field
    assert str(driven.ending.error).count("logit_bias:") == bool(field)


def spoil_scores(**fields: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda events: [replace(event, **fields) if isinstance(event, Scores) else event for event in events]


@pytest.mark.parametrize("fields", [{"base_length": 2}, {"form": TokenScores((99,))}], ids=["base", "id"])
def test_scores_that_break_the_contract_fail_the_request(fields: dict[str, Any]) -> None:
    setting = Setting(has_draft=False)
    setting.bench.change_target_events = spoil_scores(**fields)
    driven = setting.run(plan_of(temperature=0.0))
    assert isinstance(driven.ending, Fail)
    assert isinstance(driven.ending.error, ProtocolError)
    assert setting.all_is_free()


def test_logprobs_left_out_by_the_target_are_its_error() -> None:
    setting = Setting(has_draft=False)
    setting.bench.change_target_events = spoil_scores(logprobs=())
    driven = setting.run(plan_of(num_logprobs=1))
    assert isinstance(driven.ending, Fail)
    assert isinstance(driven.ending.error, ProtocolError)
