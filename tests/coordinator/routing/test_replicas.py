"""Several targets and drafts: sessions spread, move when a replica goes, and give the tokens of a run alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.errors import CapacityError, PairMismatchError, UnavailableError
from outrider.ports import EventBatch, Open, Score, SessionLost, TargetCommand
from outrider.stalls import Stall
from outrider.types import AcceptanceMethod
from outrider_coordinator.requests.batch_driver import BatchDriver
from outrider_coordinator.requests.request_state import RequestState
from outrider_coordinator.session.readiness import MAX_LOSSES_ALONE, MAX_LOSSES_IN_A_ROW
from tests.coordinator.routing.fleet import (
    ROWS,
    VOCAB_SIZE,
    Found,
    ask,
    draft,
    eventually,
    fleet,
    kill,
    num_held,
    own_tokens,
    target,
)
from tests.support.coordinator_stats import stats_of
from tests.support.scripted_ports import ToyDraft, ToyTarget

LONG = ask(max_tokens=200)
PAGES_OF_LONG = -(-203 // 4)


async def test_sessions_spread_over_targets_and_drafts() -> None:
    targets, drafts = [target(), target()], [draft(), draft()]
    toys: list[ToyTarget | ToyDraft] = [*targets, *drafts]
    for toy in targets:
        toy.faults.hold = True
    async with fleet(Found(*targets), Found(*drafts)) as made:
        await eventually(lambda: made.is_attached(2, 2))
        tasks = [asyncio.create_task(made.run(ask(seed=seed))) for seed in range(8)]
        await eventually(lambda: stats_of(made.coordinator).num_running == 8)
        pages_of_one = -(-27 // 4)
        assert [num_held(toy) for toy in targets] == [4 * pages_of_one] * 2
        await eventually(lambda: [num_held(toy) for toy in drafts] == [4 * pages_of_one] * 2)
        for toy in targets:
            toy.faults.hold = False
            toy.release_held()
        assert len({result.token_ids for result in await asyncio.gather(*tasks)}) == 1
        await eventually(made.is_free)
        assert all(len(toy.links) == 1 for toy in toys)


async def test_a_session_that_drafts_nothing_is_no_session_of_a_draft() -> None:
    async with fleet(Found(target()), Found(draft())) as made:
        await eventually(lambda: made.is_attached(1, 1))
        drafts = made.coordinator.services.draft
        for num_tokens in (0, 4):
            stream = made.stream(ask(max_tokens=200, num_speculative_tokens=num_tokens))
            await stream.read(5)
            assert drafts is not None and [each.num_sessions for each in drafts.known] == [num_tokens > 0]
            await stream.finish()


async def test_new_sessions_go_where_work_progresses() -> None:
    """Progress counts for more than a prompt that a target has served before."""
    prompt, (stalled, sound) = (1, 2, 3) * 7, (target(), target())
    async with fleet(Found(stalled, sound)) as made:
        await eventually(lambda: made.is_attached(2))
        first = await made.run(ask(prompt_token_ids=prompt))
        num_forwards = stalled.num_forwards
        assert num_forwards and not sound.num_forwards
        stalled.faults.stall = Stall(5.0, 10.0)
        results = await asyncio.gather(*(made.run(ask(prompt_token_ids=prompt, seed=seed)) for seed in range(4)))
        assert {result.token_ids for result in results} == {first.token_ids}
        assert stalled.num_forwards == num_forwards and sound.num_forwards
        sound.faults.stall = Stall(5.0, 10.0)  # then either will do
        await made.run(ask(seed=5))
        await eventually(made.is_free)


@pytest.mark.parametrize("method", [AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED])
async def test_a_target_killed_under_load_loses_no_token(method: AcceptanceMethod) -> None:
    temperature = 1.0 if method is AcceptanceMethod.COUPLED else 0.0
    requests = [ask(max_tokens=200, seed=seed, acceptance_method=method, temperature=temperature) for seed in range(6)]
    expected = [await own_tokens(request) for request in requests]
    first, second = target(), target()
    async with fleet(Found(first, second), Found(draft())) as made:
        await eventually(lambda: made.is_attached(2, 1))
        streams = [made.stream(request) for request in requests]
        for stream in streams:
            await stream.read(20)
        assert num_held(first) and num_held(second)
        kill(first)
        results = await asyncio.gather(*(stream.finish() for stream in streams))
        assert [result.token_ids for result in results] == expected
        assert made.is_attached(1, 1)
        assert made.ups == [True]
        assert stats_of(made.coordinator).num_failed == 0
        await eventually(made.is_free)


async def test_each_target_that_is_attached_lets_so_many_requests_run() -> None:
    first, second = target(), target()
    async with fleet(Found(first, second), max_running_requests=2) as made:
        await eventually(lambda: made.is_attached(2))
        first.faults.hold = second.faults.hold = True
        streams = [made.stream(LONG) for _ in range(6)]
        reading = [asyncio.create_task(stream.finish()) for stream in streams]
        await eventually(lambda: stats_of(made.coordinator).num_running == 4)
        assert stats_of(made.coordinator).num_waiting == 2
        usage = {reading.name: reading.value for reading in made.coordinator.readings()}["outrider_kv_cache_usage_perc"]
        assert isinstance(usage, float)
        assert 0 <= usage < 1
        kill(first)
        await eventually(lambda: made.is_attached(1))
        # Those that run go on, on the target that is left.
        assert stats_of(made.coordinator).num_running == 4
        second.faults.hold = False
        second.release_held()
        results = await asyncio.gather(*reading)
        assert all(len(result.token_ids) == LONG.max_tokens for result in results)
        assert max(result.timing.queue for result in results) > 0
        await eventually(made.is_free)


async def test_a_draft_killed_sends_its_sessions_to_the_other() -> None:
    expected = await own_tokens(LONG)
    first, second = draft(), draft()
    async with fleet(Found(target()), Found(first, second)) as made:
        await eventually(lambda: made.is_attached(1, 2))
        streams = [made.stream(LONG) for _ in range(4)]
        for stream in streams:
            await stream.read(20)
        assert num_held(first) and num_held(second)
        kill(first)
        for stream in streams:
            await stream.read(60)
        assert (num_held(first), num_held(second)) == (0, 4 * PAGES_OF_LONG)
        results = await asyncio.gather(*(stream.finish() for stream in streams))
        assert [result.token_ids for result in results] == [expected] * 4
        # The target accepts all: whoever went on without a draft would have needed a step a token.
        assert max(result.speculation.num_steps for result in results) < 60


async def test_all_targets_killed_is_a_pause_until_one_is_back() -> None:
    expected = await own_tokens(LONG)
    toys = target(), target()
    async with fleet(Found(*toys)) as made:
        await eventually(lambda: made.is_attached(2))
        streams = [made.stream(LONG) for _ in range(3)]
        for stream in streams:
            await stream.read(20)
        for toy in toys:
            kill(toy)
        await eventually(lambda: made.is_attached(0))
        assert made.ups == [True, False]
        toys[1].faults.unreachable = False
        for stream in streams:
            assert (await stream.finish()).token_ids == expected
        assert made.ups == [True, False, True]


async def test_held_scores_that_cannot_be_judged_end_the_link_of_their_target(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, take_early = await own_tokens(LONG), BatchDriver.take_early
    broken: list[Any] = [EventBatch((), batched=(None,))]  # type: ignore[arg-type]
    num_drafts_lost = 0

    def draft_lost(self: BatchDriver, replica: object) -> None:
        nonlocal num_drafts_lost
        num_drafts_lost += 1

    async with fleet(Found(target()), Found(draft())) as made:
        await eventually(lambda: made.is_attached(1, 1))
        (replica,) = made.coordinator.services.target.attached

        def with_broken(self: BatchDriver) -> Any:
            return take_early(self) + ([(replica, broken.pop())] if broken else [])

        with monkeypatch.context() as patched:
            patched.setattr(BatchDriver, "take_early", with_broken)
            patched.setattr(BatchDriver, "draft_lost", draft_lost)
            assert (await made.run(LONG)).token_ids == expected
            assert (made.ups, num_drafts_lost) == ([True, False, True], 0)


async def test_a_replica_that_appears_is_used_and_one_that_leaves_finishes_its_sessions() -> None:
    old, new = target(), target()
    found = Found(old)
    async with fleet(found) as made:
        stream = made.stream(LONG)
        await stream.read(20)
        found.listed = {"new:1": new}
        made.toys.add(new)
        await eventually(lambda: made.is_attached(2))
        await found.seen()
        held = num_held(old)
        assert held > 0
        await made.run(ask())
        assert (num_held(old), new.num_forwards > 0) == (held, True)
        assert (await stream.finish()).token_ids == await own_tokens(LONG)
        await eventually(lambda: made.is_attached(1))
        assert old.link.is_closed
        assert made.ups == [True]


async def test_one_that_leaves_takes_sessions_while_there_is_no_other() -> None:
    only = target()
    found = Found(only)
    async with fleet(found) as made:
        stream = made.stream(LONG)
        await stream.read(5)
        found.listed = {}
        await found.seen()
        assert len((await made.run(ask())).token_ids) == 24
        found.listed = {"0:1": only}
        await found.seen()
        await stream.finish()
        assert len(only.links) == 1


async def test_one_that_left_and_was_lost_is_not_waited_for() -> None:
    old, new = target(), target()
    found = Found(old, new)
    async with fleet(found) as made:
        await eventually(lambda: made.is_attached(2))
        streams = [made.stream(LONG) for _ in range(2)]
        for stream in streams:
            await stream.read(5)
        del found.listed["0:1"]
        await found.seen()
        old.break_links()
        for stream in streams:
            assert (await stream.finish()).token_ids == await own_tokens(LONG)
        await found.seen()
        assert len(old.links) == 1


async def test_a_resolver_that_is_down_changes_nothing() -> None:
    found = Found(target(), target())
    async with fleet(found) as made:
        await eventually(lambda: made.is_attached(2))
        found.is_down = True
        await found.seen()
        assert len((await made.run(ask())).token_ids) == 24
        assert made.is_attached(2)


async def test_nobody_listed_at_first_is_waited_for() -> None:
    toy = target()
    found = Found()
    starting = asyncio.create_task(_served(found))
    await found.seen()
    assert not starting.done()
    found.listed = {"late:1": toy}
    assert await starting == 24


async def _served(found: Found) -> int:
    async with fleet(found) as made:
        return len((await made.run(ask())).token_ids)


async def test_another_model_is_not_used_and_the_rest_serve(caplog: pytest.LogCaptureFixture) -> None:
    good, other = target(), target(tokenizer_hash="other")
    good_draft, bad_draft = draft(), draft(tokenizer_hash="other")
    with caplog.at_level(logging.WARNING):
        found = Found(good)
        async with fleet(found, Found(bad_draft, good_draft)) as made:
            found.listed["other:1"] = other
            await eventually(lambda: "the target at other:1 is not attached" in caplog.text)
            results = await asyncio.gather(*(made.run(ask(seed=seed)) for seed in range(4)))
            assert {len(result.token_ids) for result in results} == {24}
            assert all(result.speculation.num_draft_tokens for result in results)
            assert made.is_attached(1, 1)
    assert "tokenizer_hash is 'other', not 'toy'" in caplog.text
    assert "the draft at 0:1 is not attached" in caplog.text
    assert other.links == bad_draft.links == []


async def test_nothing_that_fits_is_said_at_start() -> None:
    with pytest.raises(PairMismatchError):
        async with fleet(Found(target()), Found(draft(tokenizer_hash="x"), draft(tokenizer_hash="y"))):
            pass


async def test_a_full_target_sends_a_session_to_another_before_it_waits() -> None:
    """Pages of one are taken by somebody else: nobody waits while the other has room."""
    full, roomy = target(), target(num_pages=1000)
    async with fleet(Found(full, roomy), Found(draft())) as made:
        await eventually(lambda: made.is_attached(2, 1))
        full.faults.refuse = 1_000_000
        results = await asyncio.gather(*(made.run(ask(seed=seed)) for seed in range(4)))
        assert {result.token_ids for result in results} == {await own_tokens(ask())}
        assert all(result.speculation.num_draft_tokens for result in results), "a draft is given to it again"
        assert full.num_forwards == 0
        full.faults.refuse = 0


@pytest.mark.parametrize("num_tokens", [0, 20])
async def test_a_target_that_refused_is_asked_again_when_the_other_dies(num_tokens: int) -> None:
    """Loss of the other before its first answer, and after."""
    expected = await own_tokens(LONG)
    first, second = target(), target(num_pages=1000)
    async with fleet(Found(first, second), target_timeout_s=60) as made:
        await eventually(lambda: made.is_attached(2))
        first.faults.refuse, second.faults.hold = 1, not num_tokens
        stream = made.stream(LONG)
        reading = asyncio.create_task(stream.read(num_tokens or 1))
        await eventually(lambda: len(stream.token_ids) >= num_tokens and num_held(second) == PAGES_OF_LONG)
        assert num_held(first) == 0
        kill(second)
        await reading
        assert (await stream.finish()).token_ids == expected


async def test_a_name_that_stands_for_another_by_now() -> None:
    old, new = target(), target()
    found = Found(old)
    async with fleet(found) as made:
        stream = made.stream(LONG)
        await stream.read(5)
        found.listed = {}
        await found.seen()
        kill(old)
        await eventually(lambda: made.is_attached(0))
        made.toys.add(new)
        found.listed = {"0:1": new}
        assert (await stream.finish()).token_ids == await own_tokens(LONG)
        assert made.is_attached(1)


async def test_when_all_refuse_it_waits_and_is_tried_again() -> None:
    toys = target(), target()
    async with fleet(Found(*toys)) as made:
        await eventually(lambda: made.is_attached(2))
        for toy in toys:
            toy.faults.refuse = 2
        assert len((await made.run(ask())).token_ids) == 24
        assert all(toy.faults.refuse < 2 for toy in toys)


async def test_a_draft_without_room_sends_a_session_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.toy_models import ToyDraftCore

    monkeypatch.setattr(ToyDraftCore, "retry_after_ms", 0)
    full, roomy = draft(), draft(num_pages=1000)
    async with fleet(Found(target()), Found(full, roomy)) as made:
        await eventually(lambda: made.is_attached(1, 2))
        full.faults.refuse = 1_000_000
        result = await made.run(LONG)
        assert result.speculation.num_draft_tokens > 0
        full.faults.refuse = 0


async def test_a_session_goes_where_it_fits() -> None:
    """Targets of one model may differ in room: what only one can hold is put there."""
    small, large = target(num_pages=10), target(num_pages=100)
    async with fleet(Found(small, large)) as made:
        await eventually(lambda: made.is_attached(2))
        results = await asyncio.gather(*(made.run(LONG) for _ in range(3)))
        assert {len(result.token_ids) for result in results} == {200}
        assert small.num_forwards == 0
        kill(large)
        await eventually(lambda: made.is_attached(1))
        with pytest.raises(CapacityError, match="no target that could hold this request"):
            await made.run(LONG)
        assert len((await made.run(ask())).token_ids) == 24


async def test_a_session_that_fits_nowhere_any_more_is_not_kept_for_ever() -> None:
    small, large = target(num_pages=10), target(num_pages=100)
    async with fleet(Found(small, large), target_timeout_s=0.05) as made:
        await eventually(lambda: made.is_attached(2))
        stream = made.stream(LONG)
        await stream.read(5)
        kill(large)
        with pytest.raises(UnavailableError, match=r"no target that could hold it was back after 0\.05 s"):
            await stream.finish()


GIVE_UP_S = 1234.0
GiveUps = list[Callable[[], None]]


@pytest.fixture
def give_ups(monkeypatch: pytest.MonkeyPatch) -> GiveUps:
    """Callbacks that are to be called after ``GIVE_UP_S``, in place of timers."""
    found: GiveUps = []
    call_later = RequestState.call_later

    def noted(request: RequestState, seconds: float, callback: Callable[[], None]) -> None:
        if seconds == GIVE_UP_S:
            found.append(callback)
        else:
            call_later(request, seconds, callback)

    monkeypatch.setattr(RequestState, "call_later", noted)
    return found


async def test_the_time_without_a_target_begins_anew_with_each_loss(give_ups: GiveUps) -> None:
    toy = target()
    async with fleet(Found(toy), target_timeout_s=GIVE_UP_S) as made:
        stream = made.stream(LONG)
        await stream.read(5)
        toy.break_links()
        await stream.read(20)
        kill(toy)
        await eventually(lambda: len(give_ups) == 2)
        give_ups[0]()
        toy.faults.unreachable = False
        assert (await stream.finish()).token_ids == await own_tokens(LONG)
        assert stats_of(made.coordinator).num_failed == 0


async def test_replicas_that_break_again_and_again_change_no_token() -> None:
    expected = await own_tokens(LONG)
    targets, drafts = [target(), target(), target()], [draft(), draft()]
    async with fleet(Found(*targets), Found(*drafts)) as made:
        await eventually(lambda: made.is_attached(3, 2))
        streams = [made.stream(LONG) for _ in range(9)]
        for number in range(12):
            for stream in streams:
                await stream.read(10 * number + 5)
            targets[number % 3].break_links()
            drafts[number % 2].break_links()
        results = await asyncio.gather(*(stream.finish() for stream in streams))
        assert [result.token_ids for result in results] == [expected] * 9
        await eventually(made.is_free)
        await eventually(lambda: made.is_attached(3, 2))
        replicas = made.coordinator.services.target.known
        assert [replica.num_sessions for replica in replicas] == [0, 0, 0]


async def test_targets_that_break_often_in_a_row_fail_no_request_but_the_one_they_break_over() -> None:
    """Every session is lost unanswered many times. Then one at a time is sent, and breaks no target any more."""
    requests = [ask(max_tokens=40, seed=seed) for seed in range(4)]
    expected = [await own_tokens(request) for request in requests]
    toy = target()
    async with fleet(Found(toy)) as made:
        toy.faults.hold = True
        tasks = [asyncio.create_task(made.run(request)) for request in requests]
        await eventually(lambda: stats_of(made.coordinator).num_running == len(requests))
        for num_sent in [4] * MAX_LOSSES_IN_A_ROW + [4] + [1] * (2 * MAX_LOSSES_ALONE):
            await eventually(lambda num_sent=num_sent: len(toy.link.core.sessions) == num_sent)  # type: ignore[misc]
            num_links = len(toy.links)
            toy.break_links("killed")
            await eventually(lambda num_links=num_links: len(toy.links) > num_links)  # type: ignore[misc]
        toy.faults.hold = False
        toy.release_held()
        results = await asyncio.gather(*tasks)
        assert [result.token_ids for result in results] == expected
        assert stats_of(made.coordinator).num_failed == 0


async def test_sessions_that_were_lost_most_often_are_rebuilt_first_and_suspects_last(give_ups: GiveUps) -> None:
    """Targets that are killed while they rebuild would otherwise lose the same sessions each time."""
    toy = target()
    async with fleet(Found(toy), target_timeout_s=GIVE_UP_S) as made:
        toy.faults.hold = True
        tasks = [asyncio.create_task(made.run(ask(seed=seed))) for seed in range(5)]
        await eventually(lambda: len(toy.link.core.sessions) == len(tasks))
        running = sorted(made.coordinator.request_manager.running(), key=lambda request: request.session)
        losses = (0, 2, 1, MAX_LOSSES_IN_A_ROW + 2, MAX_LOSSES_IN_A_ROW + 1)
        for request, num_losses in zip(running, losses, strict=True):
            request.loop.target.losses = num_losses
        toy.break_links("killed")
        await eventually(lambda: len(toy.links) == 2 and len(toy.link.core.sessions) == 4)
        opened = [command.session for message in toy.link.sent for command in message if isinstance(command, Open)]
        assert opened == [running[index].session for index in (1, 2, 0, 4)]
        assert len(give_ups) == len(tasks)
        for give_up in tuple(give_ups):
            give_up()
        assert len(give_ups) == len(tasks) + 2, "suspects are given up no sooner than they had their turn"
        toy.faults.hold = False
        toy.release_held()
        await asyncio.gather(*tasks)


class _Poisoned(ToyTarget):
    """Breaks over every prompt that begins with 7."""

    async def attach(self) -> Any:
        link = await super().attach()
        send = link.send

        def sending(commands: Sequence[TargetCommand]) -> None:
            scores = [command for command in commands if isinstance(command, Score)]
            if any(score.num_kept_tokens == 0 and score.token_ids[0] == 7 for score in scores):
                link.break_off("died of it")
            else:
                send(commands)

        link.send = sending  # type: ignore[method-assign]
        return link


async def test_the_request_over_which_targets_break_fails_and_no_other() -> None:
    requests = [ask(max_tokens=400, seed=seed) for seed in range(3)]
    expected = [await own_tokens(request) for request in requests]
    async with fleet(Found(_Poisoned(ROWS, VOCAB_SIZE))) as made:
        tasks = [asyncio.create_task(made.run(request)) for request in requests]
        with pytest.raises(
            UnavailableError, match=f"the target was lost {MAX_LOSSES_IN_A_ROW + MAX_LOSSES_ALONE + 1} times over"
        ):
            await made.run(ask(prompt_token_ids=(7, 2, 3)))
        results = await asyncio.gather(*tasks)
        assert [result.token_ids for result in results] == expected
        assert stats_of(made.coordinator).num_failed == 1


@pytest.mark.parametrize(("num_behind", "is_told"), [(0, True), (1, False)])
async def test_only_a_loss_of_what_is_asked_for_is_told(
    num_behind: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    toy = target()
    async with fleet(Found(toy)) as made:
        await eventually(lambda: made.is_attached(1))
        stream = made.stream(ask())
        await stream.read(5)
        toy.faults.hold = True
        (request,) = made.coordinator.request_manager.running()
        for _ in range(20):  # the last step that was answered is over then
            await asyncio.sleep(0)
        await eventually(lambda: request.loop.target.asked is not None)
        replica, asked = request.place.target, request.loop.target.asked
        assert replica is not None and asked is not None
        lost = SessionLost(request.session, asked - num_behind, "no proposals came")
        with caplog.at_level(logging.WARNING):
            made.coordinator.driver.on_target_batch(replica, EventBatch((lost,)))
            await asyncio.sleep(0)
        assert ("lost the session: no proposals came" in caplog.text) is is_told
        assert request.loop.spec_stats.num_target_losses == is_told
        toy.faults.hold = False
        toy.release_held()
        assert (await stream.finish()).token_ids == await own_tokens(ask())
