"""Processes that are killed, and processes that stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.faults.plan import Kind, draw_plan
from tests.faults.run import Run
from tests.faults.watch import watched

NUM_STREAMS = 16
STOP_S = (10.0, 10.0)
RESUMING = {"resume": True}


async def kill_drafts(run: Run) -> None:
    """SIGKILL of drafts under load."""
    await _suffer(run, Kind.KILL, [draft.name for draft in run.stack.drafts], overlapping=0.2)


async def kill_targets(run: Run) -> None:
    """SIGKILL of targets under load."""
    await _suffer(run, Kind.KILL, [target.name for target in run.stack.targets], overlapping=0.1)


async def kill_coordinators(run: Run) -> None:
    """SIGKILL of coordinators under load; streams resume, on another coordinator or on the same one restarted."""
    names = [coordinator.name for coordinator in run.stack.coordinators]
    await _suffer(run, Kind.KILL, names, overlapping=0.4, options=RESUMING)


async def stop_drafts(run: Run) -> None:
    """SIGSTOP of drafts under load."""
    await _suffer(run, Kind.STOP, [draft.name for draft in run.stack.drafts], longest_gap_s=1.2)


async def stop_targets(run: Run) -> None:
    """SIGSTOP of targets, one at a time, under load."""
    await _suffer(run, Kind.STOP, [target.name for target in run.stack.targets], longest_gap_s=5.0)


async def hang_drafts(run: Run) -> None:
    """Compute threads of drafts that stop for good, under load."""
    await _suffer(run, Kind.HANG, [draft.name for draft in run.stack.drafts], longest_gap_s=1.5)


async def hang_targets(run: Run) -> None:
    """Compute threads of targets that stop for good, one at a time, under load."""
    await _suffer(run, Kind.HANG, [target.name for target in run.stack.targets], longest_gap_s=15.0)


async def hang_ranks(run: Run) -> None:
    """Second ranks of targets that two share: they stop for good, one at a time, under load."""
    await _suffer(run, Kind.HANG_RANK, [target.name for target in run.stack.targets], longest_gap_s=15.0)


async def hang_coordinators(run: Run) -> None:
    """Event loops of coordinators that stop for good, under load; streams resume on another coordinator."""
    names = [coordinator.name for coordinator in run.stack.coordinators]
    await _suffer(run, Kind.HANG, names, options=RESUMING)


async def _suffer(
    run: Run,
    kind: Kind,
    victims: list[str],
    *,
    overlapping: float = 0.0,
    longest_gap_s: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    hold_s = (2.0, 3.0) if run.is_short else STOP_S
    plan = draw_plan(run.rng, run.count, kinds=[kind], victims=victims, hold_s=hold_s, overlapping=overlapping)
    async with watched(run.stack.processes) as histories:
        async with run.traffic(NUM_STREAMS, options=options) as traffic:
            await traffic.progress()
            await run.suffer(plan, traffic)
        await run.note_left_over()
    run.result.add("faults", len(plan))
    run.note_streams(traffic.tally, longest_gap_s=longest_gap_s)
    run.note_memory(histories)
