"""Compare the processor time of chosen draft lengths with that of plain decoding, on a machine that others use too.

    python tools/compare_processor_time.py ADDRESS --pid TARGET --pid DRAFT --pid COORDINATOR --pairs 40

Throughput on a shared machine says as much of its other users as of the arms. The nanoseconds that the services'
threads ran (`/proc/PID/task/*/schedstat`) do not: on processors that are all busy, tokens a second follow from them.
Arms take turns in pairs of short runs of the same prompt, in changing order. Two lines give plain's time a token over
the chosen one's (above 1: chosen is cheaper): the median over pairs, and the range that holds the true median in 95% of
all cases.
"""

import asyncio
import math
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.benchmarks.serving.load import Decoding, run_load
from outrider.benchmarks.serving.workload import Traffic, random_prompts
from outrider.client import AsyncClient

app = typer.Typer(add_completion=False, help=__doc__)


def processor_seconds(pids: Sequence[int]) -> float:
    """Seconds that all living threads of the processes ran."""
    nanoseconds = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            nanoseconds += int(stat.read_text().split()[0])
    return 1e-9 * nanoseconds


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics that hold the true median in 95% of all cases, by the normal approximation of signs."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half) - 1
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


async def compare(address: str, pids: list[int], *, pairs: int, users: int, input_len: int, output_len: int) -> None:
    """Play the pairs and print the ratios of processor time and of wall time."""
    async with AsyncClient(address) as client:
        info = await client.model_info()
        chosen = Decoding(max_tokens=output_len)
        arms = {"chosen": chosen, "plain": replace(chosen, num_speculative_tokens=0)}
        ratios: dict[str, list[float]] = {"processor": [], "wall": []}
        for index in range(-2, pairs):
            prompts = random_prompts(users, input_len, info.num_token_ids, index + 2)
            spent: dict[str, tuple[float, float]] = {}
            for name in list(arms)[:: 1 if index % 2 == 0 else -1]:
                salted = replace(arms[name], cache_salt=secrets.token_hex(8))
                before, began = processor_seconds(pids), time.perf_counter()
                run = await run_load(client, prompts, Traffic(), salted)
                if len(run.completed) != users:
                    raise RuntimeError(f"{name}: {run.records[0].error}")
                spent[name] = processor_seconds(pids) - before, time.perf_counter() - began
            if index >= 0:
                for place, kind in enumerate(ratios):
                    ratios[kind].append(spent["plain"][place] / spent["chosen"][place])
                print(
                    f"pair {index}: {', '.join(f'{kind} {found[-1]:.3f}' for kind, found in ratios.items())}",
                    flush=True,
                )
        for kind, values in ratios.items():
            low, high = median_range(values)
            median = statistics.median(values)
            print(f"{kind:>10}: plain over chosen {median:.3f} ({low:.3f} to {high:.3f}), {pairs} pairs")


@app.command(help=__doc__)
def main(
    address: str,
    *,
    pid: Annotated[list[int], typer.Option(help="A service's process; may be repeated.")],
    pairs: Annotated[int, typer.Option(min=8)] = 40,
    users: Annotated[int, typer.Option(min=1)] = 1,
    input_len: Annotated[int, typer.Option(min=1)] = 32,
    output_len: Annotated[int, typer.Option(min=2)] = 128,
) -> None:
    """Print both ratios."""
    asyncio.run(compare(address, pid, pairs=pairs, users=users, input_len=input_len, output_len=output_len))


if __name__ == "__main__":
    app()
