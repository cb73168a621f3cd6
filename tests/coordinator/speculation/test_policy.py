"""Draft lengths by request and by load."""

from __future__ import annotations

import asyncio
import logging

import pytest

from outrider.limits import MAX_DRAFT_LENGTH
from outrider.ports import DraftEvent, EventBatch, ForwardReport, Proposal
from outrider.transport.link.outbox import Outbox
from outrider.types import StepCost
from outrider_coordinator.requests.session_driver import call_after_commands
from outrider_coordinator.speculation import DraftLengthPolicy, order
from outrider_coordinator.speculation.controller import DraftLengthController
from outrider_coordinator.speculation.explanation import reason_of
from outrider_coordinator.speculation.rounds import RoundLearner
from outrider_coordinator.speculation.sessions import ControlledSession, Mode
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft


def test_a_requests_own_length_counts_over_the_default() -> None:
    policy = DraftLengthPolicy(4)
    assert [policy.length(policy.session(requested)) for requested in (None, 0, 7, 10_000)] == [
        4,
        0,
        7,
        MAX_DRAFT_LENGTH,
    ]


def test_it_goes_off_at_the_load_and_on_below() -> None:
    policy = DraftLengthPolicy(4, disable_by_batch_size=3)
    session = policy.session(None)
    lengths = []
    for load in (2, 3, 4, 3, 2, 0):
        policy.num_requests = load
        lengths.append(policy.length(session))
    assert lengths == [4, 0, 0, 0, 4, 4]


@pytest.mark.parametrize("is_controlled", [False, True])
def test_sessions_count_for_the_order_of_their_target_alone(
    is_controlled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "FIRST_TRIAL_S", 0.0)
    policy, changes = DraftLengthPolicy(4, is_controlled=is_controlled), list[tuple[object, bool]]()
    policy.take_order = lambda target, is_ahead: changes.append((target, is_ahead))
    session = policy.session(None)
    for target in ("first", "second"):
        policy.enter(session, target)
    for _ in range(2 * order.TOKENS_OF_WINDOW):
        policy.note_verdict(session, 4, 3, num_uncomputed=0)
    assert changes[0] == ("second", True)


def test_0_never_goes_off() -> None:
    policy = DraftLengthPolicy(4)
    policy.num_requests = 10**6
    assert policy.length(policy.session(None)) == 4


def test_the_load_switches_a_controlled_policy_off_too() -> None:
    policy = DraftLengthPolicy(8, disable_by_batch_size=2, is_controlled=True)
    session = policy.session(None)
    policy.enter(session, "target")
    policy.begin("target", 1.0)
    policy.note_verdict(session, 0, 0, num_uncomputed=0)
    assert policy.length(session) > 0
    policy.num_requests = 2
    assert policy.length(session) == 0
    assert policy.no_draft_reason(session) is WithoutDraft.LOAD
    assert not policy.will_draft(session, 100)


def test_a_request_bounds_what_a_controller_chooses() -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    none, one = policy.session(0), policy.session(1)
    for session in (none, one):
        policy.enter(session, "target")
        policy.begin("target", 1.0)
        policy.note_verdict(session, 0, 0, num_uncomputed=0)
    assert (policy.length(none), policy.length(one)) == (0, 1)
    assert policy.no_draft_reason(none) is WithoutDraft.NOT_ASKED


def test_nothing_is_drafted_on_a_target_that_takes_a_prompt_in() -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    running, elsewhere, coming = (policy.session(None) for _ in range(3))
    for session, target in ((running, "a"), (elsewhere, "b")):
        policy.enter(session, target)
        policy.begin(target, 1.0)
        policy.note_verdict(session, 0, 0, num_uncomputed=0)
    policy.enter(coming, "a")
    assert policy.length(running) == 0
    assert policy.no_draft_reason(running) is WithoutDraft.PROMPTS
    assert policy.length(elsewhere) > 0
    policy.leave(coming)
    assert policy.length(running) > 0


def test_a_batchs_lengths_are_those_of_its_sessions_by_one_look_at_its_controller() -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    sessions = [policy.session(limit) for limit in (None, 0, 2)]
    assert policy.lengths([]) == policy.are_plain([]) == []
    for session in sessions:
        policy.enter(session, "target")

    def note_step(*, num_uncomputed: int) -> None:
        policy.begin("target", 1.0)
        for session in sessions:
            policy.note_verdict(session, 0, 0, num_uncomputed=num_uncomputed)
        policy.end("target", None)
        policy.choose("target")

    def answers() -> tuple[list[int], list[bool]]:
        lengths, are_plain = policy.lengths(sessions), policy.are_plain(sessions)
        assert lengths == [policy.length(session) for session in sessions]
        are_prefilling = map(policy.is_prefilling_drafts, sessions)
        assert are_plain == [not (length or lags) for length, lags in zip(lengths, are_prefilling, strict=True)]
        return lengths, are_plain

    assert answers() == ([0, 0, 0], [True] * 3)  # prompts are computed
    note_step(num_uncomputed=128)
    assert answers() == ([0, 0, 0], [False, True, False])  # drafts are brought their text
    note_step(num_uncomputed=0)
    lengths, are_plain = answers()
    assert lengths[0] > 0 and lengths[1:] == [0, min(lengths[0], 2)]
    assert are_plain == [False, True, False]
    controller = policy.controllers.get("target")
    assert controller is not None
    asked: list[int] = []
    controller.length = lambda session: asked.append(1) or 0  # type: ignore[method-assign,func-returns-value]
    assert policy.lengths(sessions) == lengths
    assert asked == []


def test_what_a_draft_has_taken_in_is_newer_than_verdicts_that_wait_to_be_learned_from() -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    sessions = [policy.session(None) for _ in range(2)]
    for session in sessions:
        policy.enter(session, "target")

    def hear(num_uncomputed: int) -> None:
        policy.begin("target", 1.0)
        for session in sessions:
            policy.note_verdict(session, 0, 0, num_uncomputed=num_uncomputed)
        policy.end("target", None)

    hear(128)
    policy.choose("target")
    assert all(map(policy.is_prefilling_drafts, sessions))
    hear(129)
    for session in sessions:
        policy.note_text_taken(session, num_uncomputed=1)
    policy.note_proposals("target", _text_taken(len(sessions)))
    policy.choose("target")
    assert [session.num_uncomputed for session in sessions] == [1, 1]
    assert not any(map(policy.is_prefilling_drafts, sessions))


def _text_taken(num_sessions: int) -> EventBatch[DraftEvent]:
    report = ForwardReport(0, 5_000_000, 0, 5_000_000, num_sessions, 128 * num_sessions, 0)
    return EventBatch(tuple(Proposal(number, 1, 128, ()) for number in range(num_sessions)), report, (), ())


def test_the_load_switches_a_batch_off() -> None:
    for policy in (DraftLengthPolicy(8, disable_by_batch_size=2, is_controlled=True), DraftLengthPolicy(8)):
        session = policy.session(None)
        policy.enter(session, "target")
        policy.num_requests = 2
        is_off = policy.is_controlled
        assert (policy.lengths([session]), policy.are_plain([session])) == ([0 if is_off else 8], [is_off])


def test_an_idle_servers_length_is_that_with_which_the_next_session_begins() -> None:
    assert DraftLengthPolicy(8).mean_length == 8.0
    policy = DraftLengthPolicy(8, is_controlled=True)
    assert policy.mean_length == 8.0
    session = policy.session(None)
    policy.enter(session, "target")
    controller = policy.controllers.get("target")
    assert controller is not None
    assert 0 < policy.mean_length == session.length == controller.expectation.length
    policy.leave(session)
    assert policy.mean_length == controller.first_length > 0


def test_the_services_step_costs_decide_before_any_traffic() -> None:
    """Step costs of a slow draft beside a fast target, and the other way round."""
    slow, fast = ([StepCost(1, length, 0, ms * length * 1_000_000) for length in (1, 9)] for ms in (20, 1))
    for target, draft, mode in ((fast, slow, Mode.PLAIN), (slow[:1], fast, Mode.SPECULATIVE)):
        policy = DraftLengthPolicy(8, is_controlled=True)
        policy.enter(policy.session(None), "target", target_costs=target, draft_costs=draft)
        controller = policy.controllers.get("target")
        assert controller is not None
        assert controller.mode is mode
        assert "by the services' step costs" in reason_of(controller)


@pytest.mark.parametrize("has_drafted", [False, True])
def test_a_burst_is_plain_as_it_arrives_unless_sessions_draft_already(has_drafted: bool) -> None:
    """A target decodes ahead while it computes the prompts."""
    policy = DraftLengthPolicy(4, is_controlled=True)
    first, *others = (policy.session(None) for _ in range(128))
    policy.enter(first, "target")
    assert policy.is_to_draft(first)
    policy.begin("target", 1.0)
    policy.note_verdict(first, 0, 0, num_uncomputed=0)
    policy.end("target", None)
    policy.choose("target")
    if has_drafted:
        policy.begin("target", 1.1)
        policy.note_verdict(first, 4, 4, num_uncomputed=0)
        policy.end("target", None)
        policy.choose("target")
    for session in others:
        policy.enter(session, "target")
    assert {policy.is_to_draft(session) for session in (first, *others)} == {has_drafted}


def test_a_target_that_is_lost_is_learned_anew() -> None:
    policy = DraftLengthPolicy(4, is_controlled=True)
    session = policy.session(None)
    policy.enter(session, "target")
    before = policy.controllers.get("target")
    policy.remove_target("target")
    assert policy.controllers.get("target") is None and not policy.end("target", None)
    policy.leave(session)
    policy.enter(session, "target")
    assert policy.controllers.get("target") is not before
    policy.remove_target("another")


def test_the_mean_of_fixed_lengths_is_that_of_the_requests_that_run() -> None:
    policy = DraftLengthPolicy(5)
    sessions = [policy.session(None), policy.session(12), policy.session(0)]
    for number, session in enumerate(sessions):
        policy.enter(session, number % 2)
    policy.enter(sessions[1], "another target")  # it was rebuilt there
    assert policy.mean_length == 17 / 3
    for session in sessions[:2]:
        policy.leave(session)
    assert policy.mean_length == 0.0
    policy.leave(sessions[2])
    assert policy.mean_length == 5.0


def test_without_a_draft_nothing_is_wanted() -> None:
    policy = DraftLengthPolicy(8, has_draft=False, is_controlled=True)
    assert not policy.is_controlled
    assert policy.length(policy.session(5)) == 0


def _controlled() -> tuple[DraftLengthPolicy, ControlledSession, DraftLengthController]:
    """A policy with one session on its target."""
    policy = DraftLengthPolicy(8, is_controlled=True)
    session = policy.session(None)
    policy.enter(session, "target")
    controller = policy.controllers.get("target")
    assert controller is not None
    return policy, session, controller


def test_a_message_is_learned_from_when_it_is_chosen_or_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, session, _ = _controlled()
    ended: list[ForwardReport] = []
    monkeypatch.setattr(RoundLearner, "note_forward", lambda learner, report, context: ended.append(report))
    reports = [ForwardReport(1, 2_000_000, 3_000_000, 4, 5, number, 7, 8, 9, 10) for number in range(2)]

    def hear(now: float, report: ForwardReport) -> None:
        policy.begin("target", now)
        policy.note_verdict(session, 0, 0, num_uncomputed=0)
        assert policy.end("target", report)

    hear(1.0, reports[0])
    assert ended == []  # the commands that follow from the message come first
    policy.choose("target")
    policy.choose("target")
    assert ended == reports[:1]
    hear(2.0, reports[1])
    assert ended == reports[:1]
    policy.begin("target", 3.0)
    assert ended == reports
    assert not policy.end("another", None)


def test_every_choice_is_told_in_a_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    policy = DraftLengthPolicy(8, is_controlled=True)
    session = policy.session(None)
    policy.enter(session, "target")
    for level, num_told in ((logging.INFO, 0), (logging.DEBUG, 1)):
        caplog.clear()
        with caplog.at_level(level, logger="outrider_coordinator.speculation.policy"):
            for now in (1.0, 1.1, 1.2, 1.3, 1.4):
                policy.begin("target", now)
                policy.note_verdict(session, 0, 0, num_uncomputed=40)
                policy.end("target", ForwardReport(1, 1, 1, 4_000_000, 0, 0, 0))
                policy.choose("target")
        told = [record for record in caplog.records if record.message == "draft lengths were chosen"]
        assert bool(told) is bool(num_told)
    fields = told[0].__dict__["fields"]
    assert (fields["target"], fields["sessions"], fields["has_profile"]) == ("target", 1, False)
    assert fields["plain_tokens"] == 1.0 < fields["speculative_tokens"]
    assert fields["plain_ms"] > 0.0 < fields["speculative_ms"]


async def test_what_can_wait_comes_after_the_commands_were_taken_to_be_written() -> None:
    loop, outbox, order = asyncio.get_running_loop(), Outbox[str](), list[str]()

    async def write() -> None:
        async for message in outbox.take():
            order.append(message)

    done = asyncio.Event()

    def learn() -> None:
        order.append("learned")
        done.set()

    def send() -> None:
        outbox.put("written")
        order.append("sent")

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    loop.call_soon(send)  # as a dispatch scheduler does
    call_after_commands(learn)
    await done.wait()
    assert order == ["sent", "written", "learned"]
    outbox.close()
    await writing


def test_verdicts_on_a_session_that_leaves_are_learned() -> None:
    policy, session, controller = _controlled()
    before = controller.acceptance.mean
    policy.begin("target", 0.0)
    policy.note_verdict(session, 0, 0, num_uncomputed=0)
    policy.note_verdict(session, 4, 4, num_uncomputed=0)
    policy.leave(session)
    policy.end("target", None)
    policy.choose("target")
    assert controller.acceptance.mean > before
