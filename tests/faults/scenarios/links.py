"""Links that are cut, stalled, swallowed, delayed, thinned and truncated by proxies."""

from __future__ import annotations

from tests.faults.plan import LINK_KINDS, draw_plan
from tests.faults.run import Run
from tests.faults.watch import watched

NUM_STREAMS = 8
LONGEST_PAUSE_S = 6.0
MOST_MEMORY_MIB = 64
_HOLD_S = (0.2, 6.0)


async def link_faults(run: Run) -> None:
    """Every kind of fault on the links of targets and drafts, one after another."""
    hold_s = (0.1, 1.0) if run.is_short else _HOLD_S
    plan = draw_plan(
        run.rng,
        run.count,
        kinds=LINK_KINDS,
        victims=list(run.stack.proxies),
        hold_s=hold_s,
    )
    await run.touch_pages()
    async with watched(run.stack.processes) as histories:
        async with run.traffic(NUM_STREAMS) as traffic:
            await traffic.progress()
            await run.suffer(plan, traffic)
        await run.note_left_over()
    run.result.add("faults", len(plan))
    run.note_streams(traffic.tally, longest_gap_s=LONGEST_PAUSE_S)
    run.note_memory(histories, most_mib=MOST_MEMORY_MIB)
