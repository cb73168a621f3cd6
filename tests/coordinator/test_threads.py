"""Threads of the coordinator: what is cancelled while it waits for one is let go of."""

from __future__ import annotations

import asyncio
import threading

from outrider_coordinator.threads import MOST_THREADS, Threads


async def test_cancelled_work_is_not_handed_to_a_thread() -> None:
    threads, may_end, num_begun, num_given = Threads(), threading.Event(), 0, 0
    loop = asyncio.get_running_loop()
    give = loop.run_in_executor

    def counted(*given: object) -> object:
        nonlocal num_given
        num_given += 1
        return give(*given)  # type: ignore[arg-type]

    loop.run_in_executor = counted  # type: ignore[method-assign,assignment]

    def work() -> None:
        nonlocal num_begun
        num_begun += 1
        may_end.wait(120)

    calls = [asyncio.create_task(threads.call(work, in_thread=True)) for _ in range(5 * MOST_THREADS)]
    async with asyncio.timeout(240):
        while num_begun < MOST_THREADS:
            await asyncio.sleep(0.01)
    for task in calls:
        task.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert num_given == MOST_THREADS
    may_end.set()
    async with asyncio.timeout(240):
        await threads.call(work, in_thread=True)
    assert num_begun == MOST_THREADS + 1
