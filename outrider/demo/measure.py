"""One server against itself: the same requests with speculation and without, in turn.

Interleaved, so that a machine that slows down meanwhile slows both; the figures are medians. Every request has a fixed
number of tokens, so that both sides do the same work also where they draw different texts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.client import AsyncClient
from outrider.generation import GenerationResult, SpeculationStats


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The same requests one after another, as their caller saw them."""

    seconds: float
    results: tuple[GenerationResult, ...]

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(result.usage.completion_tokens for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens by the time from the first call to the last one's end."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class DemoComparison:
    """Runs with speculation and without, pairwise of the same prompts and seed."""

    temperature: float
    draft_length: int
    with_draft: tuple[DemoRun, ...]
    without: tuple[DemoRun, ...]

    @property
    def speed(self) -> float:
        """Median tokens a second with speculation."""
        return statistics.median(run.tokens_per_second for run in self.with_draft)

    @property
    def plain_speed(self) -> float:
        """Median tokens a second without."""
        return statistics.median(run.tokens_per_second for run in self.without)

    @property
    def ratio(self) -> float:
        """Ratio of the speeds with and without speculation."""
        return self.speed / self.plain_speed

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted by drafted tokens; None when none was drafted."""
        num_drafted = sum(stats.num_draft_tokens for stats in self._stats)
        return sum(stats.num_accepted_tokens for stats in self._stats) / num_drafted if num_drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens gained by a step that had a proposal; None when no step had one."""
        num_steps = sum(sum(stats.acceptance_histogram) for stats in self._stats)
        return 1 + sum(stats.num_accepted_tokens for stats in self._stats) / num_steps if num_steps else None

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens by the target's passes, the prefills included."""
        return sum(run.num_tokens for run in self.with_draft) / sum(stats.num_steps for stats in self._stats)

    @property
    def _stats(self) -> list[SpeculationStats]:
        return [result.speculation for run in self.with_draft for result in run.results]


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Requests of every run."""

    prompts: tuple[str, ...]
    temperature: float
    max_tokens: int


async def compare(
    client: AsyncClient,
    workload: DemoWorkload,
    *,
    draft_length: int,
    num_runs: int,
    on_run: Callable[[], None] = lambda: None,
) -> DemoComparison:
    """``num_runs`` pairs of runs; which of a pair goes first alternates. The run's number is its seed."""
    runs: dict[int, list[DemoRun]] = {draft_length: [], 0: []}
    for seed in range(num_runs):
        for length in (draft_length, 0) if seed % 2 == 0 else (0, draft_length):
            runs[length].append(await _run(client, workload, draft_length=length, seed=seed))
            on_run()
    return DemoComparison(workload.temperature, draft_length, tuple(runs[draft_length]), tuple(runs[0]))


async def _run(client: AsyncClient, workload: DemoWorkload, *, draft_length: int, seed: int) -> DemoRun:
    started = time.perf_counter()
    results = [
        await client.generate(
            prompt=prompt,
            max_tokens=workload.max_tokens,
            ignore_eos=True,
            temperature=workload.temperature,
            seed=seed,
            num_speculative_tokens=draft_length,
        )
        for prompt in workload.prompts
    ]
    return DemoRun(seconds=time.perf_counter() - started, results=tuple(results))
