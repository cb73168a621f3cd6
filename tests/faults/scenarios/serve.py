"""`outrider serve` whose output cannot be written: it has to go on supervising, and nobody may wait for its log."""

from __future__ import annotations

import asyncio

from tests.faults.plan import Kind, draw_plan
from tests.faults.run import Run
from tests.faults.served import ServedStack
from tests.faults.watch import watched

NUM_STREAMS = 8
_REQUESTS_A_KILL = 750
_AT_ONCE = 16
_RESUMING = {"resume": True, "resume_timeout": 240}


async def serve(run: Run) -> None:
    """Kills of every service, then as many one-token requests as are counted, then SIGTERM."""
    stack = run.stack
    assert isinstance(stack, ServedStack)
    num_kills = max(3, run.count // _REQUESTS_A_KILL)
    victims = [process.name for process in stack.processes]
    plan = draw_plan(run.rng, num_kills, kinds=[Kind.KILL], victims=victims)
    async with watched(stack.processes) as histories:
        async with run.traffic(NUM_STREAMS, options=_RESUMING) as traffic:
            await traffic.progress()
            await run.suffer(plan, traffic)
        await _ask_often(run)
        await run.note_left_over()
    run.result.add("kills", len(plan))
    run.note_streams(traffic.tally)
    run.note_memory(histories)
    run.result.add("supervisor ended early", stack.is_over, 0)
    code, num_left = await stack.terminate()
    run.result.add("exit code after SIGTERM", -1 if code is None else code, 0)
    run.result.add("processes left", num_left, 0)


async def _ask_often(run: Run) -> None:
    """Each request makes some lines of log."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask(number: int) -> None:
        async with places:
            await run.clients[0].generate(prompt="def f", max_tokens=1, temperature=0, seed=number, timeout=300)

    await asyncio.gather(*(ask(number) for number in range(run.count)))
    run.say(f"{run.count} requests of one token")
