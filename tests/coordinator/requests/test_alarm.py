"""Timers that are set and cleared at every step."""

from __future__ import annotations

import asyncio

from outrider_coordinator.requests.deadline_timer import DeadlineTimer
from tests.coordinator.test_service import eventually


async def test_it_rings_once() -> None:
    alarm, rung = DeadlineTimer(), list[str]()
    alarm.set(0.001, lambda: rung.append("first"))
    await eventually(lambda: bool(rung))
    alarm.set(0.001, lambda: rung.append("second"))
    await eventually(lambda: len(rung) > 1)
    assert rung == ["first", "second"]


async def test_the_last_time_counts() -> None:
    alarm, rung = DeadlineTimer(), list[str]()
    alarm.set(0.001, lambda: rung.append("too early"))
    began = asyncio.get_running_loop().time()
    alarm.set(0.02, lambda: rung.append("later"))
    await eventually(lambda: bool(rung))
    assert rung == ["later"]
    assert asyncio.get_running_loop().time() - began >= 0.0199  # timers may ring a resolution of the clock too early


async def test_an_earlier_time_is_kept_too() -> None:
    alarm, rung = DeadlineTimer(), list[str]()
    alarm.set(1000, lambda: rung.append("late"))
    alarm.set(0.001, lambda: rung.append("early"))
    await eventually(lambda: bool(rung))
    assert rung == ["early"]


async def test_a_cleared_one_is_silent_and_can_be_set_again() -> None:
    alarm, rung = DeadlineTimer(), list[str]()
    alarm.set(0.001, lambda: rung.append("cleared"))
    alarm.clear()
    other = DeadlineTimer()
    other.set(0.01, lambda: rung.append("other"))
    await eventually(lambda: bool(rung))
    assert rung == ["other"]
    alarm.set(0.001, lambda: rung.append("again"))
    await eventually(lambda: len(rung) > 1)
    alarm.cancel()
    assert rung == ["other", "again"]
