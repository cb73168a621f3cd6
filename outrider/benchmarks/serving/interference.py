"""Interference of long prompts: gaps between the messages of running streams, with and without a prefill.

Owns the two arms, in turn: running requests alone, and the same requests while prompts of a given length are prefilled
one after the other. Only gaps during which such a prompt was under way count for the second.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.samples import ratio, statistics_of
from outrider.benchmarks.schema import Result, Series
from outrider.benchmarks.serving.gate import GateReport, check_exactness
from outrider.benchmarks.serving.load import Decoding, run_load
from outrider.benchmarks.serving.records import Record, Run
from outrider.benchmarks.serving.workload import Prompt, Traffic, require_capacity
from outrider.client import AsyncClient
from outrider.errors import UnavailableError

ALONE, BESIDE = "alone", "beside a prefill"
Interval = tuple[float, float]
"""Interval from when a long prompt was sent to its first token, in seconds since the run began."""


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """Running streams, and the long prompts that interfere."""

    running: tuple[Prompt, ...]
    arriving: tuple[Prompt, ...]
    """Prefilled one after the other, again and again, until the running requests have ended."""
    decoding: Decoding
    num_runs: int = 3
    num_gate_prompts: int = 2
    """Number of the prompts whose greedy output is compared first."""
    num_gate_tokens: int = 32
    tie_tolerance: float = 1e-3


@dataclass(frozen=True, slots=True)
class InterferenceOutcome:
    """Gaps in milliseconds, of all runs."""

    alone: tuple[float, ...]
    beside: tuple[float, ...]
    prefills: tuple[float, ...]
    """Times from sending a long prompt to its first token, in milliseconds."""
    gate: GateReport
    draft_length: int

    @property
    def p99_ratio(self) -> float | None:
        """Ratio of the 99th percentiles of the gaps."""
        alone, beside = statistics_of(self.alone), statistics_of(self.beside)
        return None if alone is None or beside is None else ratio(beside.p99, alone.p99)


async def run_plan(client: AsyncClient, plan: InterferencePlan) -> InterferenceOutcome:
    """Both arms, as often as the plan says.

    ``GateError`` when speculation changes greedy output; ``UnavailableError`` when a request failed or no prompt was in
    the way.
    """
    info = await client.model_info()
    require_capacity(plan.running, plan.decoding.max_tokens, info.max_model_len)
    require_capacity(plan.arriving, 1, info.max_model_len)
    draft_length = plan.decoding.num_speculative_tokens
    if draft_length is None:
        draft_length = info.num_speculative_tokens
    gate = await check_exactness(
        client,
        plan.running[: plan.num_gate_prompts],
        max_tokens=plan.num_gate_tokens,
        num_speculative_tokens=draft_length,
        tie_tolerance=plan.tie_tolerance,
    )
    found: dict[str, list[float]] = {ALONE: [], BESIDE: []}
    prefills: list[float] = []
    await run_load(client, plan.running, Traffic(), plan.decoding)
    for _ in range(plan.num_runs):
        run = whole(await run_load(client, plan.running, Traffic(), plan.decoding))
        found[ALONE] += [1e3 * gap for record in run.records for gap in record.gaps]
        run, intervals = await _beside(client, plan)
        found[BESIDE] += [1e3 * gap for record in whole(run).records for gap in gaps_within(record, intervals)]
        prefills += [1e3 * (end - start) for start, end in intervals]
    if not found[BESIDE]:
        raise UnavailableError("no gap fell into a prefill: let the running requests ask for more tokens")
    return InterferenceOutcome(tuple(found[ALONE]), tuple(found[BESIDE]), tuple(prefills), gate, draft_length)


def gaps_within(record: Record, intervals: Sequence[Interval]) -> list[float]:
    """Gaps that share a moment with an interval."""
    pairs = zip(record.token_times, record.token_times[1:], strict=False)
    return [
        later - earlier for earlier, later in pairs if any(start < later and earlier < end for start, end in intervals)
    ]


async def _beside(client: AsyncClient, plan: InterferencePlan) -> tuple[Run, list[Interval]]:
    began, intervals = time.perf_counter(), list[Interval]()
    arriving = asyncio.create_task(_keep_arriving(client, plan, began, intervals))
    try:
        run = await run_load(client, plan.running, Traffic(), plan.decoding, began=began)
    finally:
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)
    if arriving.done() and not arriving.cancelled() and arriving.exception() is not None:
        raise UnavailableError(f"a long prompt failed: {arriving.exception()}")
    return run, intervals


async def _keep_arriving(client: AsyncClient, plan: InterferencePlan, began: float, intervals: list[Interval]) -> None:
    while True:
        for prompt in plan.arriving:
            sent = time.perf_counter() - began
            await client.generate(prompt_token_ids=prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
            intervals.append((sent, time.perf_counter() - began))


def whole(run: Run) -> Run:
    """The run; ``UnavailableError`` if one of its requests failed."""
    failed = next((record.error for record in run.records if record.result is None), None)
    if failed is not None:
        raise UnavailableError(f"a running request failed: {failed}")
    return run


def to_result(
    outcome: InterferenceOutcome, plan: InterferencePlan, *, name: str, device: str, configuration: dict[str, Any]
) -> Result:
    """The result to save."""
    return Result(
        kind="interference",
        name=name,
        created_at=now(),
        environment=describe_environment(device),
        configuration={
            **configuration,
            "num_running": len(plan.running),
            "prefill_tokens": max(map(len, plan.arriving)),
            "output_len": plan.decoding.max_tokens,
            "num_runs": plan.num_runs,
            "num_speculative_tokens": outcome.draft_length,
            "gate": dataclasses.asdict(outcome.gate),
            "tie_tolerance": plan.tie_tolerance,
        },
        series=(
            Series("itl", "ms", outcome.alone, {"arm": ALONE}),
            Series("itl", "ms", outcome.beside, {"arm": BESIDE}),
            Series("prefill", "ms", outcome.prefills),
        ),
        figures={"p99_ratio": outcome.p99_ratio},
    )
