"""Fuzzed messages to every method of every server, while one user reads streams beside them."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.faults.run import Run
from tests.faults.watch import watched

LONGEST_GAP_S = 0.5
MOST_MEMORY_MIB = 64
_LINE_LIMIT_BYTES = 1 << 26


async def fuzz(run: Run) -> None:
    """Fuzzed messages, as many as are counted."""
    await run.touch_pages()
    pids = [process.pid for process in run.stack.processes]
    async with watched(run.stack.processes) as histories:
        async with run.traffic(1) as traffic:
            await traffic.progress()
            outcome = await _campaign(run)
        await run.note_left_over()
    run.result.problems += outcome["findings"]
    run.result.add("messages", outcome["num_messages"])
    run.result.add("oversized requests", outcome["num_oversized"])
    run.result.add("UNKNOWN, INTERNAL or hung", len(outcome["findings"]), 0)
    run.result.add("processes lost", sum(pid not in pids for pid in _pids(run)), 0)
    run.result.samples["statuses"] = outcome["statuses"]
    run.result.samples["slowest_calls"] = [
        {"seconds": round(seconds, 3), "ended": round(ended, 3), "answer": answer}
        for seconds, ended, answer in sorted(outcome["slowest"], reverse=True)
    ]
    run.note_streams(traffic.tally, longest_gap_s=LONGEST_GAP_S)
    run.note_memory(histories, most_mib=MOST_MEMORY_MIB)


def _pids(run: Run) -> list[int | None]:
    return [process.pid for process in run.stack.processes]


async def _campaign(run: Run) -> dict[str, Any]:
    """Outcome of the campaign, from a process of its own."""
    firsts = {"coordinator": run.stack.coordinators, "target": run.stack.targets, "draft": run.stack.drafts}
    addresses = [word for role, processes in firsts.items() for word in (f"--{role}", processes[0].address)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.fuzzing", *addresses),
        *("--seed", str(run.rng.getrandbits(32)), "--count", str(run.count)),
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_LIMIT_BYTES,
    )
    record: dict[str, Any] = {}
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            record = json.loads(line)
            run.say(line.decode().strip()[:120])
        assert await process.wait() == 0, "the campaign broke off"
    finally:
        if process.returncode is None:
            process.kill()
    outcome: dict[str, Any] = record["outcome"]
    return outcome
