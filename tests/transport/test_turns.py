"""Turns: few at a time, in rotation over hosts and connections, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time

import pytest

from outrider.transport.turns import Turns

HOSTS = ("ipv4:10.0.0.1", "ipv4:10.0.0.2")


class Caller:
    """Takes turns and says who has had one."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.began: list[str] = []
        self.num_now = self.most_now = 0
        self.may_end = asyncio.Event()

    async def call(self, peer: str) -> None:
        async with self.turns.taken(peer):
            self.began.append(peer)
            self.num_now += 1
            self.most_now = max(self.num_now, self.most_now)
            try:
                await self.may_end.wait()
            finally:
                self.num_now -= 1


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_hosts_and_their_connections_are_served_in_rotation() -> None:
    caller = Caller(Turns(1, busy_s=60, longest_s=60))
    crowd = [f"{HOSTS[0]}:1"] * 3 + [f"{HOSTS[0]}:2"] * 2 + [f"{HOSTS[1]}:1"] * 2
    calls = [asyncio.create_task(caller.call(peer)) for peer in crowd]
    await settle()
    caller.may_end.set()
    await asyncio.gather(*calls)
    assert [peer[-3:] for peer in caller.began] == ["1:1", "1:1", "2:1", "1:2", "2:1", "1:1", "1:2"]
    assert caller.most_now == 1


async def test_a_turn_that_nobody_waits_for_lasts_and_the_oldest_ends_when_somebody_does() -> None:
    caller = Caller(Turns(2, busy_s=0, longest_s=60))
    first, second = (asyncio.create_task(caller.call(f"{HOSTS[0]}:{port}")) for port in (1, 2))
    await settle()
    third = asyncio.create_task(caller.call(f"{HOSTS[0]}:3"))
    with pytest.raises(TimeoutError):
        await first
    await settle()
    assert len(caller.began) == 3
    assert not second.done()
    caller.may_end.set()
    await asyncio.gather(second, third)


async def test_a_turn_ends_at_its_limit() -> None:
    caller = Caller(Turns(1, busy_s=0.01, longest_s=0.01))
    with pytest.raises(TimeoutError):
        await caller.call(HOSTS[0])


async def test_what_came_while_the_loop_was_held_up_is_read() -> None:
    turns, loop = Turns(1, busy_s=0.01, longest_s=0.01), asyncio.get_running_loop()
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        async with turns.taken(HOSTS[0]):
            loop.call_soon(time.sleep, 0.05)
            loop.call_soon(writer.send, b"x")
            assert await loop.sock_recv(reader, 1) == b"x"


@pytest.mark.parametrize("seed", range(20))
async def test_no_turn_is_lost_to_calls_that_are_cancelled_at_any_moment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.transport.turns.LAST_CHANCE_S", 0)
    rng, turns = random.Random(seed), Turns(3, busy_s=0, longest_s=60)
    caller, calls = Caller(turns), list[asyncio.Task[None]]()
    for _ in range(200):
        match rng.randrange(4):
            case 0 | 1:
                calls.append(asyncio.create_task(caller.call(f"{rng.choice(HOSTS)}:{rng.randrange(3)}")))
            case 2 if calls:
                rng.choice(calls).cancel()
            case _:
                await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert caller.most_now <= 3
    caller = Caller(turns)
    calls = [asyncio.create_task(caller.call(HOSTS[0])) for _ in range(3)]
    await settle()
    assert caller.num_now == 3
    caller.may_end.set()
    await asyncio.gather(*calls)


async def test_silent_connections_wait_behind_the_others() -> None:
    turns = Turns(1, busy_s=0, longest_s=0, demotes_silent=True)
    began: list[str] = []

    async def stay_silent(peer: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with turns.taken(peer):
                began.append(peer)
                await asyncio.Event().wait()

    silent = [f"{HOSTS[0]}:{port}" for port in range(10)]
    await asyncio.gather(*map(stay_silent, silent))
    began.clear()
    again = [asyncio.create_task(stay_silent(peer)) for peer in silent]
    await settle()
    async with turns.taken(f"{HOSTS[0]}:probe"):
        began.append("probe")
    await asyncio.gather(*again)
    assert began.index("probe") <= 2  # one has the turn, and one of four is theirs
    assert sorted(began) == sorted([*silent, "probe"])
