"""Reasons of draft lengths, as ``outrider info`` and the log give them."""

from __future__ import annotations

import logging
import re

import pytest

from outrider.ports import ForwardReport
from outrider_coordinator.speculation import DraftLengthPolicy, Mode
from outrider_coordinator.speculation.explanation import draft_length_reason, reason_of
from tests.coordinator.speculation.simulated_load import H200, Controlled, Load, costs_of

TARGET = "target"


def policy_of(num_users: int, acceptance: float, seconds: float, *, max_length: int = 8) -> DraftLengthPolicy:
    """A policy whose controller serves these users for so long."""
    policy = DraftLengthPolicy(8, is_controlled=True)
    first, pair = policy.session(None), H200()
    policy.enter(first, TARGET, **costs_of(pair))
    load = Load(pair, lambda now, number: acceptance, seed=1)
    users = Controlled(load, max_length=max_length, controller=policy.controllers.get(TARGET))
    policy.leave(first)
    users.run(num_users, seconds)
    return policy


def test_drafts_that_do_not_pay_are_explained_by_what_both_modes_are_expected_to_give() -> None:
    policy = policy_of(32, 0.4, 3.0)
    controller = policy.controllers.get(TARGET)
    assert controller is not None
    assert controller.mode is Mode.PLAIN
    found = re.fullmatch(
        r"drafting does not pay: expected (0\.\d\d) of plain at K=(\d) with 32 sessions"
        r" \((\S+) tokens in (\S+) ms; plain 32\.0 tokens in (\S+) ms\), by (.+)",
        draft_length_reason(policy, is_draft_up=True),
    )
    assert found is not None
    ratio = controller.expectation.rates[Mode.SPECULATIVE] / controller.expectation.rates[Mode.PLAIN]
    assert abs(float(found[1]) - ratio) < 0.006
    assert int(found[2]) == controller.expectation.length
    tokens, seconds = controller.expectation.rounds[Mode.SPECULATIVE]
    assert (float(found[3]), float(found[4])) == (round(tokens, 1), round(1e3 * seconds, 1))
    assert found[6] in ("the services' step costs", "rounds that were measured")


def test_estimates_without_a_profile_are_said_to_be_usual_ones() -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    policy.enter(policy.session(None), TARGET)
    controller = policy.controllers.get(TARGET)
    assert controller is not None
    assert reason_of(controller).startswith("drafting pays: expected ")
    assert reason_of(controller).endswith("by usual step costs: the services measured none")


def test_sessions_that_draft_are_explained_by_the_same_figures() -> None:
    policy = policy_of(1, 0.9, 2.0)
    controller = policy.controllers.get(TARGET)
    assert controller is not None and controller.is_speculating
    found = re.fullmatch(
        r"drafting pays: expected (\d\.\d\d) of plain at K=\d with 1 session"
        r" \(\S+ tokens in \S+ ms; plain 1\.0 tokens in \S+ ms\), by rounds that were measured",
        draft_length_reason(policy, is_draft_up=True),
    )
    assert found is not None and float(found[1]) > 1.2


def test_a_change_of_the_mode_is_told_in_the_log_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    sessions = [policy.session(None) for _ in range(128)]
    with caplog.at_level(logging.INFO, logger="outrider_coordinator.speculation.policy"):
        for arrived in (sessions[:1], sessions[1:]):
            for session in arrived:
                policy.enter(session, TARGET)
            policy.begin(TARGET, 1.0)
            for session in arrived:
                policy.note_verdict(session, 0, 0, num_uncomputed=4000)
            policy.end(TARGET, ForwardReport(1, 1, 1, 4_000_000, len(arrived), len(arrived) * 40, 0))
            policy.choose(TARGET)
    controller = policy.controllers.get(TARGET)
    assert controller is not None
    assert controller.mode is Mode.PLAIN
    first, record = caplog.records
    assert first.message == "decoding is speculative from now on"
    assert record.message == "decoding is plain from now on"
    fields = record.__dict__["fields"]
    assert fields["reason"] == reason_of(controller)
    assert fields["plain_tokens"] == 128.0
    assert fields["plain_ms"] > 0.0


def test_requests_that_ask_for_no_drafts_are_named() -> None:
    policy = policy_of(2, 0.9, 0.5, max_length=0)
    assert draft_length_reason(policy, is_draft_up=True) == "no request asks for drafts"


def test_an_idle_server_has_nothing_to_explain_unless_its_draft_is_gone() -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    assert draft_length_reason(policy, is_draft_up=True) == ""
    assert draft_length_reason(policy, is_draft_up=False) == "draft unavailable"


def test_the_switch_by_load_is_named() -> None:
    for is_controlled in (True, False):
        policy = DraftLengthPolicy(8, disable_by_batch_size=4, is_controlled=is_controlled)
        policy.num_requests = 5
        assert draft_length_reason(policy, is_draft_up=True) == "disabled by batch size: 5 requests run or wait"
        policy.num_requests = 3
        assert draft_length_reason(policy, is_draft_up=True) == ""
        never = DraftLengthPolicy(8, disable_by_batch_size=1, is_controlled=is_controlled)
        assert draft_length_reason(never, is_draft_up=True).startswith("disabled by batch size: 1 turns drafts off")


def test_drafting_that_is_slower_than_expected_is_not_said_to_pay() -> None:
    """The mode changes once that gains more than the change costs."""
    controller = policy_of(1, 0.9, 2.0).controllers.get(TARGET)
    assert controller is not None and controller.is_speculating
    tokens, seconds = controller.expectation.rounds[Mode.PLAIN]
    controller.expectation.rounds[Mode.SPECULATIVE] = 0.8 * tokens, seconds
    assert reason_of(controller).startswith("drafting goes on: expected 0.80 of")
