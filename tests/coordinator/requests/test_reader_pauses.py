"""Readers that do not read: their sessions pause, give their pages back, and go on with the same tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from outrider.errors import DeadlineError
from outrider.generation import Delta
from outrider.ports import Extend, Score
from outrider.types import AcceptanceMethod
from outrider_coordinator.requests import output_collector, request_runner
from outrider_coordinator.requests.admission import Admission
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.service import Coordinator
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.state import SessionStatus
from tests.coordinator.acceptance.test_joint_distribution import BAD, BLOCK, DRAFT_LENGTH, LANGUAGE, VOCAB_SIZE
from tests.coordinator.blocks import BlockDraft, BlockTarget
from tests.coordinator.driving import Bench, Driven, make_plan
from tests.coordinator.routing.fleet import kill
from tests.coordinator.setting import OTHER_ROWS, Setting, own_tokens, plan_of
from tests.coordinator.test_service import SOON_S, Stack, ask, complete, eventually, settings_of
from tests.support.coordinator_stats import stats_of
from tests.support.scripted_ports import ToyDraft, ToyTarget
from tests.support.statistics import chi_square_p

COUPLED, REJECTION = AcceptanceMethod.COUPLED, AcceptanceMethod.REJECTION
NUM_TOKENS = 2 * BLOCK
NUM_DRAWS = 5_000
FEW_UNREAD = 8


# The state machine.


def release(bench: Bench, driven: Driven, number: int) -> None:
    """Release a session, and start it again under another number."""
    bench.tell(driven, SessionLoop.release)
    bench.tell(driven, SessionLoop.draft_lost)
    bench.run()
    bench.sessions[number] = driven
    if bench.facts is not None:
        facts = bench.facts
        bench.tell(driven, lambda loop: loop.draft_back(facts))
    bench.tell(driven, SessionLoop.resume)
    bench.tell(driven, lambda loop: loop.start(number))


@pytest.mark.parametrize("method", [REJECTION, COUPLED])
@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize("rounds", range(6))
def test_a_paused_session_is_sent_nothing_and_goes_on_with_the_same_tokens(
    rounds: int, is_released: bool, method: AcceptanceMethod
) -> None:
    """Greedy where acceptance is by rejection: what is sampled there depends on the draft lengths."""
    plan = plan_of(method=method, temperature=0.0 if method is REJECTION else 1.0)
    setting = Setting(draft_rows=OTHER_ROWS)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.bench.tell(driven, SessionLoop.pause)
    setting.bench.run()
    assert driven.loop.status is SessionStatus.PAUSED
    assert 0 < len(driven.token_ids) < plan.max_tokens
    assert not any(isinstance(command, Score | Extend) for command in setting.bench.to_target + setting.bench.to_draft)
    if is_released:
        release(setting.bench, driven, 77)
        assert setting.bench.to_target[-1].num_kept_tokens == 0
    else:
        setting.bench.tell(driven, SessionLoop.resume)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)
    assert setting.all_is_free()


def test_released_in_the_middle_of_a_step_it_holds_nothing() -> None:
    setting, plan = Setting(), plan_of(method=COUPLED)
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.bench.tell(driven, SessionLoop.pause)
    setting.bench.tell(driven, SessionLoop.release)
    setting.bench.run()
    assert driven.loop.status is SessionStatus.WAITING
    assert setting.all_is_free()


@pytest.mark.parametrize("event", [SessionLoop.target_lost, SessionLoop.draft_lost])
def test_losses_while_it_is_paused_are_made_good_when_it_goes_on(event: object) -> None:
    setting, plan = Setting(draft_rows=OTHER_ROWS), plan_of(method=COUPLED)
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.bench.tell(driven, SessionLoop.pause)
    setting.bench.run()
    setting.target_core.release_all()
    setting.bench.tell(driven, event)  # type: ignore[arg-type]
    setting.bench.tell(driven, SessionLoop.target_back)
    assert not setting.bench.to_target
    setting.bench.tell(driven, SessionLoop.resume)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)


@pytest.mark.parametrize("rounds", range(4))
def test_released_while_its_target_is_lost_it_is_rebuilt_when_it_goes_on(rounds: int) -> None:
    setting, plan = Setting(draft_rows=OTHER_ROWS), plan_of(method=COUPLED)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.bench.tell(driven, SessionLoop.pause)
    setting.bench.to_target.clear()
    setting.target_core.release_all()
    setting.bench.tell(driven, SessionLoop.target_lost)
    release(setting.bench, driven, 77)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)
    assert setting.all_is_free()


def test_paused_and_released_at_random_output_follows_the_joint_distribution() -> None:
    assert _p_value(num_draws=NUM_DRAWS) > 1e-3


def _p_value(num_draws: int) -> float:
    """P-value of the hypothesis that blocks of rejection sampling are drawn from the language's joint distribution."""
    bench, rng = Bench(BlockTarget(LANGUAGE), BlockDraft(BAD), draft_length=DRAFT_LENGTH), random.Random(7)
    plans = [
        make_plan(vocab_size=VOCAB_SIZE, max_tokens=NUM_TOKENS, method=REJECTION, seed=seed)
        for seed in range(num_draws * BLOCK // NUM_TOKENS)
    ]
    streams = [bench.add(plan) for plan in plans]
    num_pauses, number = 0, len(streams)
    while running := [driven for driven in streams if not driven.loop.is_over]:
        bench.round()
        for driven in running:
            if driven.loop.is_paused:
                if rng.random() < 0.5:
                    bench.tell(driven, SessionLoop.resume)
                elif not driven.loop.is_over:
                    number += 1
                    _release_beside_others(bench, driven, number)
            elif rng.random() < 0.3:
                num_pauses += 1
                bench.tell(driven, SessionLoop.pause)
    assert num_pauses > len(streams) / 2
    drawn = np.array([driven.token_ids for driven in streams]).reshape(-1, BLOCK)
    observed = np.bincount(drawn @ (VOCAB_SIZE ** np.arange(BLOCK)[::-1]), minlength=VOCAB_SIZE**BLOCK)
    return chi_square_p(observed, LANGUAGE.joint(BLOCK))


def _release_beside_others(bench: Bench, driven: Driven, number: int) -> None:
    bench.tell(driven, SessionLoop.release)
    bench.tell(driven, SessionLoop.draft_lost)
    assert bench.facts is not None
    facts = bench.facts
    bench.tell(driven, lambda loop: loop.draft_back(facts))
    bench.tell(driven, SessionLoop.resume)
    bench.sessions[number] = driven
    bench.tell(driven, lambda loop: loop.start(number))


# Admission.


def test_a_paused_entry_leaves_its_place_to_others_and_returns_to_its_own() -> None:
    admission: Admission[str] = Admission(max_running=1, max_queue=2)
    for entry in ("old", "young"):
        admission.submit(entry)
    assert admission.next() == "old"
    assert admission.next() is None
    admission.pause("old")
    assert (len(admission.running), len(admission.waiting), len(admission.paused)) == (0, 1, 1)
    assert admission.next() == "young"
    admission.submit("youngest")
    assert admission.resume("old")
    assert not admission.resume("old")
    admission.leave("young")
    assert admission.next() == "old"


def test_a_waiting_entry_may_be_paused_too_and_a_paused_one_leave() -> None:
    admission: Admission[str] = Admission(max_running=1, max_queue=2)
    for entry in ("running", "waiting"):
        admission.submit(entry)
    admission.next()
    admission.pause("waiting")
    admission.pause("waiting")
    assert (len(admission.waiting), len(admission.paused)) == (0, 1)
    admission.leave("waiting")
    assert len(admission.paused) == 0


# The coordinator.


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_collector, "MAX_UNREAD_TOKENS", FEW_UNREAD)
    monkeypatch.setattr(request_runner, "MAX_PAUSE_WITH_PAGES_S", 0.01)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """Stack with capacity for one running request."""
    rows = OTHER_ROWS
    stack = Stack(ToyTarget(rows, 8), ToyDraft(rows, 8), settings_of(max_running_requests=1))
    await stack.coordinator.start()
    yield stack
    await stack.coordinator.close()


def value(coordinator: Coordinator, name: str) -> float:
    (found,) = [reading.value for reading in coordinator.readings() if reading.name == name]
    return found  # type: ignore[return-value]


async def take(deltas: AsyncIterator[Delta], found: list[int]) -> None:
    async for delta in deltas:
        found += delta.token_ids


@pytest.mark.parametrize(("method", "temperature"), [(REJECTION, 0.0), (COUPLED, 1.0)])
async def test_an_unread_request_makes_room_for_others_and_goes_on_when_it_is_read(
    stack: Stack, method: AcceptanceMethod, temperature: float
) -> None:
    request = ask(acceptance_method=method, temperature=temperature, seed=5, max_tokens=200)
    expected = await complete(stack.coordinator, request)
    deltas = stack.coordinator.generate_stream(request)
    found = list((await anext(deltas)).token_ids)
    await eventually(lambda: value(stack.coordinator, "outrider_num_requests_paused") == 1)
    await eventually(stack.is_free)
    assert value(stack.coordinator, "outrider_num_requests_running") == 0
    others = [await complete(stack.coordinator, request) for _ in range(2)]
    assert {other.token_ids for other in others} == {expected.token_ids}
    await take(deltas, found)
    assert tuple(found) == expected.token_ids
    assert value(stack.coordinator, "outrider_num_requests_paused") == 0
    assert value(stack.coordinator, "outrider_request_pauses_total") >= 1


async def test_an_unread_request_whose_target_is_lost_goes_on_when_it_is_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_runner, "MAX_PAUSE_WITH_PAGES_S", 0.2)
    request = ask(acceptance_method=COUPLED, temperature=1.0, seed=5, max_tokens=200)
    expected = await complete(stack.coordinator, request)
    deltas = stack.coordinator.generate_stream(request)
    found = list((await anext(deltas)).token_ids)
    await eventually(lambda: value(stack.coordinator, "outrider_request_pauses_total") == 1)
    kill(stack.target)
    await eventually(lambda: value(stack.coordinator, "outrider_num_requests_paused") == 1)
    stack.target.faults.unreachable = False
    async with asyncio.timeout(SOON_S):
        await take(deltas, found)
    assert tuple(found) == expected.token_ids


async def test_how_long_it_was_paused_is_told_apart_from_the_queue_and_from_the_services(stack: Stack) -> None:
    deltas = stack.coordinator.generate_stream(ask(max_tokens=200, seed=5))
    await anext(deltas)
    await eventually(lambda: value(stack.coordinator, "outrider_num_requests_paused") == 1)
    await asyncio.sleep(0.3)
    last = [delta async for delta in deltas][-1]
    assert last.result is not None
    timing = last.result.timing
    assert timing.paused >= 0.3
    assert timing.queue + timing.target + timing.draft + timing.wire + timing.paused <= timing.total


async def test_short_pauses_keep_the_pages(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time of one is not counted with that of the one before."""
    timers: list[Callable[[], None]] = []
    monkeypatch.setattr(RequestState, "call_later", lambda _request, _seconds, callback: timers.append(callback))
    deltas = stack.coordinator.generate_stream(ask(max_tokens=200, seed=5))
    for num_pauses in (1, 2):
        await anext(deltas)
        await eventually(lambda: value(stack.coordinator, "outrider_request_pauses_total") == num_pauses)  # noqa: B023
    assert len(timers) == 2
    timers[0]()
    assert value(stack.coordinator, "outrider_num_requests_paused") == 0
    assert not stack.is_free()
    last = [delta async for delta in deltas][-1]
    assert last.result is not None
    assert last.result.usage.completion_tokens == 200
    assert stats_of(stack.coordinator).spec_stats.num_target_rebuilds == 0


async def test_output_that_waits_for_long_counts_too(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_collector, "MAX_UNREAD_TOKENS", 10**6)
    monkeypatch.setattr(output_collector, "MAX_UNREAD_S", 0.0)
    deltas = stack.coordinator.generate_stream(ask(max_tokens=2000, seed=5))
    await anext(deltas)
    await eventually(lambda: value(stack.coordinator, "outrider_num_requests_paused") == 1)
    await deltas.aclose()


async def test_a_paused_request_ends_when_it_is_cancelled_expires_or_the_coordinator_closes(stack: Stack) -> None:
    async def paused(**options: Any) -> AsyncIterator[Delta]:
        deltas = stack.coordinator.generate_stream(ask(max_tokens=200, seed=5), **options)
        await anext(deltas)
        await eventually(lambda: value(stack.coordinator, "outrider_num_requests_paused") == 1)
        return deltas

    await (await paused()).aclose()  # type: ignore[attr-defined]
    assert stats_of(stack.coordinator).num_cancelled == 1
    deltas = await paused(deadline_s=3.0)
    await eventually(lambda: stats_of(stack.coordinator).num_expired == 1)
    with pytest.raises(DeadlineError):
        await take(deltas, [])
    deltas = await paused()
    await stack.coordinator.close()
    assert value(stack.coordinator, "outrider_num_requests_paused") == 0
