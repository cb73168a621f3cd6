"""Cooperative work: its result is the same with and without pauses, and others run in between."""

from __future__ import annotations

import asyncio

import pytest

from outrider import cooperative
from outrider.cooperative import SLICE_ENTRIES, Work, gather_limited, run, run_in_slices, slices_of
from outrider.generation import GenerationRequest
from outrider.requests import checks_of_request
from outrider.transport.convert.requests import request_reading, request_to_proto, request_writing
from outrider.types import SamplingParams
from outrider_coordinator.session.committed_tokens import CommittedTokens


def counting(to: int) -> Work[int]:
    for _ in range(to):
        yield
    return to


def failing() -> Work[None]:
    yield
    raise ValueError("wrong")


async def test_the_result_is_that_of_the_work_with_pauses_and_without() -> None:
    assert run(counting(9)) == await run_in_slices(counting(9)) == 9
    with pytest.raises(ValueError, match="wrong"):
        run(failing())
    with pytest.raises(ValueError, match="wrong"):
        await run_in_slices(failing())


async def test_other_tasks_run_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cooperative, "SLICE_S", 0.0)
    turns: list[str] = []

    def noting() -> Work[None]:
        for _ in range(3):
            turns.append("work")
            yield

    async def other() -> None:
        for _ in range(3):
            turns.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(run_in_slices(noting()), other())
    assert turns[:6].count("other") >= 2


async def test_short_work_is_done_in_one_turn() -> None:
    turns: list[str] = []
    asyncio.get_running_loop().call_soon(turns.append, "other")
    await run_in_slices(counting(3))
    assert turns == []


@pytest.mark.parametrize("length", [0, 1, SLICE_ENTRIES, SLICE_ENTRIES + 1, 3 * SLICE_ENTRIES])
def test_slices_are_the_list(length: int) -> None:
    entries = list(range(length))
    parts = list(slices_of(entries))
    assert [entry for part in parts for entry in part] == entries
    assert all(len(part) <= SLICE_ENTRIES for part in parts)


def test_work_on_a_short_request_has_no_pauses() -> None:
    request = GenerationRequest(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(bad_words=((4, 5),)))
    message = request_to_proto(request)
    tokens = CommittedTokens(range(1000))
    for work in (checks_of_request(request), request_reading(message), request_writing(request), tokens.prepare()):
        assert list(work) == []


def test_work_on_a_long_request_has_pauses() -> None:
    request = GenerationRequest(prompt_token_ids=tuple(range(50_000)))
    message = request_to_proto(request)
    tokens = CommittedTokens(range(50_000))
    for work in (checks_of_request(request), request_reading(message), request_writing(request), tokens.prepare()):
        assert len(list(work)) >= 5


async def test_gathered_work_runs_so_much_at_once_and_gives_results_in_order() -> None:
    running: set[int] = set()
    most_at_once = 0

    async def double(entry: int) -> int:
        nonlocal most_at_once
        running.add(entry)
        most_at_once = max(most_at_once, len(running))
        for _ in range(entry % 3):
            await asyncio.sleep(0)
        running.remove(entry)
        return 2 * entry

    assert await gather_limited(double, range(50), most=7) == [2 * entry for entry in range(50)]
    assert most_at_once == 7
    assert await gather_limited(double, [], most=7) == []


async def test_gathered_work_that_waits_has_no_task_and_is_never_begun_after_an_error() -> None:
    num_tasks, begun = len(asyncio.all_tasks()), []
    is_full, fails = asyncio.Event(), asyncio.Event()

    async def wait(entry: int) -> None:
        begun.append(entry)
        if len(begun) == 4:
            is_full.set()
        await fails.wait()
        raise ValueError(f"number {entry}")

    gathering = asyncio.create_task(gather_limited(wait, range(100_000), most=4))
    await is_full.wait()
    assert len(asyncio.all_tasks()) == num_tasks + 1 + 4
    fails.set()
    with pytest.raises(ValueError, match="number 0"):
        await gathering
    assert begun == [0, 1, 2, 3]


async def test_cancelled_gathering_cancels_its_work() -> None:
    num_cancelled = 0

    async def wait(entry: int) -> None:
        nonlocal num_cancelled
        try:
            await asyncio.Event().wait()
        finally:
            num_cancelled += 1

    gathering = asyncio.create_task(gather_limited(wait, range(9), most=3))
    for _ in range(3):
        await asyncio.sleep(0)
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert num_cancelled == 3
