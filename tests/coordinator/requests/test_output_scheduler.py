"""Time of output: after commands, first output at once, and no more messages a second than the setting says."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

from outrider_coordinator.requests.message_allowance import MOST_AT_ONCE, MessageAllowance
from outrider_coordinator.requests.output_scheduler import LONGEST_WAIT_S, OutputScheduler
from outrider_coordinator.requests.request_state import RequestState

PER_S = 1000


class Request:
    """Request as far as the scheduler knows one: it counts its messages."""

    def __init__(self, *, has_had_output: bool = True) -> None:
        self.has_had_output = has_had_output
        self.num_messages = 0
        self.is_over = False

    def flush(self) -> None:
        self.has_had_output = True
        self.num_messages += 1


def requests_of(count: int, *, has_had_output: bool = True) -> tuple[list[Request], list[RequestState]]:
    requests = [Request(has_had_output=has_had_output) for _ in range(count)]
    return requests, cast("list[RequestState]", requests)


def num_sent(requests: list[Request]) -> int:
    return sum(request.num_messages for request in requests)


async def until(is_so: Callable[[], Any]) -> None:
    while not is_so():
        await asyncio.sleep(1e-3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduler_of(per_s: int, clock: Clock) -> OutputScheduler:
    return OutputScheduler(MessageAllowance(per_s, clock, Clock()))


async def test_all_leave_where_their_rate_is_not_bounded() -> None:
    scheduler = scheduler_of(0, Clock())
    requests, states = requests_of(3 * MOST_AT_ONCE)
    scheduler.put(states)
    await until(lambda: num_sent(requests) == len(requests))


async def test_no_more_messages_leave_than_the_time_allows_and_those_that_wait_longest_are_next() -> None:
    clock = Clock()
    scheduler = scheduler_of(PER_S, clock)
    requests, states = requests_of(MOST_AT_ONCE + 40)
    scheduler.put(states)
    await until(lambda: num_sent(requests) == MOST_AT_ONCE)
    await asyncio.sleep(2 * LONGEST_WAIT_S)  # it looks again
    assert [request.num_messages for request in requests] == [1] * MOST_AT_ONCE + [0] * 40

    clock.now += 10 / PER_S
    await until(lambda: num_sent(requests) == MOST_AT_ONCE + 10)
    scheduler.put(states)  # all have a token more: it goes with the one that waits
    await asyncio.sleep(2 * LONGEST_WAIT_S)
    assert [request.num_messages for request in requests] == [1] * (MOST_AT_ONCE + 10) + [0] * 30

    clock.now += 40 / PER_S
    await until(lambda: num_sent(requests) == MOST_AT_ONCE + 50)
    assert [request.num_messages for request in requests] == [2] * 10 + [1] * (MOST_AT_ONCE + 30)


async def test_a_pause_allows_no_more_than_a_burst() -> None:
    clock = Clock()
    scheduler = scheduler_of(PER_S, clock)
    clock.now += 3600.0
    requests, states = requests_of(MOST_AT_ONCE + 1)
    scheduler.put(states)
    await until(lambda: num_sent(requests) == MOST_AT_ONCE)
    await asyncio.sleep(2 * LONGEST_WAIT_S)
    assert num_sent(requests) == MOST_AT_ONCE


async def test_first_output_is_not_held_back() -> None:
    scheduler = scheduler_of(PER_S, Clock())
    others, states = requests_of(MOST_AT_ONCE + 20)
    scheduler.put(states)
    await until(lambda: num_sent(others) == MOST_AT_ONCE)
    first, first_states = requests_of(5, has_had_output=False)
    scheduler.put([*states, *first_states])
    scheduler.put(first_states)
    await until(lambda: num_sent(first) == len(first))
    assert [request.num_messages for request in first] == [1] * len(first)
    assert num_sent(others) == MOST_AT_ONCE
    scheduler.put(first_states)
    await asyncio.sleep(2 * LONGEST_WAIT_S)
    assert num_sent(first) == len(first), "from now on as all others"


async def test_first_output_does_not_count() -> None:
    """However many requests begin, those that run get their messages."""
    clock = Clock()
    scheduler = scheduler_of(PER_S, clock)
    first, first_states = requests_of(3 * MOST_AT_ONCE, has_had_output=False)
    scheduler.put(first_states)
    await until(lambda: num_sent(first) == len(first))
    others, states = requests_of(MOST_AT_ONCE)
    scheduler.put(states)
    await until(lambda: num_sent(others) == len(others))


async def test_requests_that_have_ended_neither_stay_nor_count() -> None:
    clock = Clock()
    scheduler = scheduler_of(PER_S, clock)
    others, states = requests_of(MOST_AT_ONCE)
    scheduler.put(states)
    await until(lambda: num_sent(others) == MOST_AT_ONCE)
    ended, ended_states = requests_of(50)
    running, running_states = requests_of(1)
    scheduler.put([*ended_states, *running_states])
    for request in ended:
        request.is_over = True
    references = [weakref.ref(request) for request in ended]
    clock.now += 1.5 / PER_S
    await until(lambda: num_sent(running) == 1)
    assert num_sent(ended) == 0
    del ended, ended_states, request
    gc.collect()
    assert not any(reference() for reference in references)


async def test_a_request_that_fails_holds_up_no_other() -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    scheduler = scheduler_of(PER_S, Clock())
    requests, states = requests_of(9)
    requests[2].flush = lambda: 1 // 0  # type: ignore[method-assign,assignment]
    scheduler.put(states)
    await until(lambda: num_sent(requests) == 8)
    assert [type(context["exception"]) for context in failures] == [ZeroDivisionError]
    scheduler.put(states[:1])
    await until(lambda: requests[0].num_messages == 2)


async def test_commands_that_are_put_together_go_first() -> None:
    scheduler = scheduler_of(PER_S, Clock())
    requests, states = requests_of(2)
    scheduler.put(states)
    scheduler.commands_first()
    await asyncio.sleep(0)
    assert num_sent(requests) == 0
    await asyncio.sleep(0)
    assert num_sent(requests) == 2
