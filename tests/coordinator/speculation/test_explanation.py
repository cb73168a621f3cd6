"""Why nothing is drafted at present, as ``outrider info`` says it."""

from __future__ import annotations

import logging
import re

import pytest

from outrider.ports import ForwardReport
from outrider_coordinator.speculation import DraftLengthPolicy, Mode
from outrider_coordinator.speculation.explanation import why_not_drafting
from outrider_coordinator.speculation.exploration.budget import Excursion
from outrider_coordinator.speculation.mode_reason import mode_reason
from tests.coordinator.speculation.served_arrivals import ServedArrivals
from tests.coordinator.speculation.simulated_load import H200, Controlled, Load

TARGET = "target"


def policy_of(num_users: int, acceptance: float, seconds: float, *, max_length: int = 8) -> DraftLengthPolicy:
    """A policy whose controller serves these users for so long."""
    policy = DraftLengthPolicy(8, is_controlled=True)
    users = Controlled(Load(H200(), lambda now, number: acceptance, seed=1), max_length=max_length)
    policy._controllers[TARGET] = users.controller
    users.run(num_users, seconds)
    return policy


def test_drafts_that_do_not_pay_are_explained_by_what_is_expected_of_them() -> None:
    policy = policy_of(32, 0.5, 3.0)
    controller = policy.controller(TARGET)
    assert controller is not None
    assert controller.mode is Mode.PLAIN
    found = re.fullmatch(
        r"drafting does not pay: expected (0\.\d\d) of plain at K=(\d) with 32 sessions",
        why_not_drafting(policy, is_draft_up=True),
    )
    assert found is not None
    ratio = controller.rates[Mode.SPECULATIVE] / controller.rates[Mode.PLAIN]
    assert abs(float(found[1]) - ratio) < 0.006
    assert int(found[2]) == controller.expected_length


def test_modes_that_were_compared_are_explained_by_what_users_got() -> None:
    served = ServedArrivals(H200(), 0.81, seed=1, num_prompt_tokens=128, num_output_tokens=16)
    served.serve(32, 10.0)
    policy = DraftLengthPolicy(8, is_controlled=True)
    policy._controllers[TARGET] = controller = served.controller
    assert controller.is_compared
    found = re.fullmatch(
        r"drafting does not pay: it gave (0\.\d\d) of plain with (\d+) sessions when both were compared",
        why_not_drafting(policy, is_draft_up=True),
    )
    assert found is not None
    assert abs(float(found[1]) - controller.rates[Mode.SPECULATIVE] / controller.rates[Mode.PLAIN]) < 0.006
    assert int(found[2]) == controller.num_sessions

    controller._choice.comparison.is_pausing = False  # as when the next comparison begins
    assert why_not_drafting(policy, is_draft_up=True).startswith("decoding with and without drafts is being compared")


def test_sessions_that_draft_need_no_explanation() -> None:
    policy = policy_of(1, 0.9, 2.0)
    assert why_not_drafting(policy, is_draft_up=True) == ""


def test_a_server_that_begins_plainly_says_that_drafting_was_not_tried() -> None:
    policy = policy_of(64, 0.9, 0.01)
    assert why_not_drafting(policy, is_draft_up=True) == "drafting has not been tried yet with 64 sessions"


def test_many_sessions_whose_speculation_was_never_timed_are_said_to_be_expected_to_gain_only() -> None:
    policy = policy_of(64, 0.9, 0.01)
    controller = policy.controller(TARGET)
    assert controller is not None
    controller._choice.rates |= {Mode.PLAIN: 500.0, Mode.SPECULATIVE: 900.0}
    told = why_not_drafting(policy, is_draft_up=True)
    assert re.fullmatch(r"drafting has not been tried yet: expected 1\.80 of plain at K=\d with 64 sessions", told)
    controller._choice.doubt = 1.2
    told = why_not_drafting(policy, is_draft_up=True)
    assert told.startswith("drafting may not pay for a switch: ")
    assert told.endswith(" with 64 sessions, and timed with fewer only")


def test_a_target_that_begins_plainly_changes_its_mode(caplog: pytest.LogCaptureFixture) -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    sessions = [policy.session(None) for _ in range(64)]
    with caplog.at_level(logging.INFO, logger="outrider_coordinator.speculation.policy"):
        for session in sessions:
            policy.enter(session, TARGET)
        policy.begin(TARGET, 1.0)
        for session in sessions:
            policy.note_verdict(session, 0, 0, draft_lag=40)
        policy.end(TARGET, ForwardReport(1, 1, 1, 4_000_000, 64, 64 * 40, 0))
        policy.choose(TARGET)
    controller = policy.controller(TARGET)
    assert controller is not None
    assert (controller.mode, controller.num_switches) == (Mode.PLAIN, 1)
    (record,) = caplog.records
    assert record.message == "decoding is plain from now on"
    assert record.__dict__["fields"]["reason"] == "drafting has not been tried yet with 64 sessions"


def test_sessions_that_draft_in_a_trial_need_no_explanation() -> None:
    policy = policy_of(64, 0.9, 0.01)
    controller = policy.controller(TARGET)
    assert controller is not None
    assert controller.mode is Mode.PLAIN
    controller._choice._trials[Mode.SPECULATIVE]._excursion = Excursion(0.0)
    assert controller.is_speculating
    assert why_not_drafting(policy, is_draft_up=True) == ""


def test_modes_that_are_compared_in_turn_have_that_as_their_reason() -> None:
    served = ServedArrivals(H200(), 0.81, seed=1, num_prompt_tokens=128, num_output_tokens=16)
    served.serve(32, 10.0)
    comparison = served.controller._choice.comparison
    for mode in Mode:
        served.controller._choice.selector.mode, comparison.is_pausing = mode, False
        assert mode_reason(served.controller).startswith("decoding with and without drafts is being compared")
        comparison.is_pausing = True
        assert (mode_reason(served.controller) == "drafting pays") is (mode is Mode.SPECULATIVE)


def test_requests_that_ask_for_no_drafts_are_named() -> None:
    policy = policy_of(2, 0.9, 0.5, max_length=0)
    assert why_not_drafting(policy, is_draft_up=True) == "no request asks for drafts"


def test_an_idle_server_has_nothing_to_explain_unless_its_draft_is_gone() -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    assert why_not_drafting(policy, is_draft_up=True) == ""
    assert why_not_drafting(policy, is_draft_up=False) == "draft unavailable"


def test_the_switch_by_load_is_named() -> None:
    for is_controlled in (True, False):
        policy = DraftLengthPolicy(8, disable_by_batch_size=4, is_controlled=is_controlled)
        policy.set_load(5)
        assert why_not_drafting(policy, is_draft_up=True) == "disabled by batch size: 5 requests run or wait"
        policy.set_load(3)
        assert why_not_drafting(policy, is_draft_up=True) == ""
        never = DraftLengthPolicy(8, disable_by_batch_size=1, is_controlled=is_controlled)
        assert why_not_drafting(never, is_draft_up=True).startswith("disabled by batch size: 1 turns drafts off")
