"""One server against itself: the same requests with speculation and without, in turn.

Interleaved, so that a machine that slows down meanwhile slows both; the figures are medians. Every request has a fixed
number of tokens, so that both sides do the same work also where they draw different texts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from outrider.client import AsyncClient
from outrider.generation import GenerationResult


@dataclass(frozen=True, slots=True)
class Run:
    """One request, as its caller saw it."""

    seconds: float
    result: GenerationResult

    @property
    def tokens_per_second(self) -> float:
        """Output tokens by the time from the call to its end."""
        return self.result.usage.completion_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs with speculation and without, pairwise of the same prompt and seed."""

    temperature: float
    draft_length: int
    with_draft: tuple[Run, ...]
    without: tuple[Run, ...]

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
        """How many times as fast speculation is."""
        return self.speed / self.plain_speed

    @property
    def acceptance(self) -> float | None:
        """Accepted by judged draft tokens; None when none was judged.

        A request's last proposal may be trimmed to what is wanted; kept whole it counts as a rejection here.
        """
        stats = [run.result.speculation for run in self.with_draft]
        num_accepted = sum(item.num_accepted_tokens for item in stats)
        num_rejected = sum(sum(item.acceptance_histogram[: self.draft_length]) for item in stats)
        return num_accepted / (num_accepted + num_rejected) if num_accepted + num_rejected else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens gained by a step that had a proposal; None when no step had one."""
        stats = [run.result.speculation for run in self.with_draft]
        num_steps = sum(sum(item.acceptance_histogram) for item in stats)
        return 1 + sum(item.num_accepted_tokens for item in stats) / num_steps if num_steps else None

    @property
    def tokens_per_pass(self) -> float:
        """Output tokens by the target's passes, the prefill's included."""
        tokens = sum(run.result.usage.completion_tokens for run in self.with_draft)
        return tokens / sum(run.result.speculation.num_steps for run in self.with_draft)


async def compare(
    client: AsyncClient,
    prompts: Sequence[str],
    *,
    temperature: float,
    draft_length: int,
    num_runs: int,
    max_tokens: int,
    on_run: Callable[[], None] = lambda: None,
) -> Comparison:
    """``num_runs`` pairs of requests; which of a pair goes first alternates."""
    runs: dict[int, list[Run]] = {draft_length: [], 0: []}
    for index in range(num_runs):
        order = (draft_length, 0) if index % 2 == 0 else (0, draft_length)
        for length in order:
            request = client.generate(
                prompt=prompts[index % len(prompts)],
                max_tokens=max_tokens,
                ignore_eos=True,
                temperature=temperature,
                seed=index,
                num_speculative_tokens=length,
            )
            runs[length].append(await _timed(request))
            on_run()
    return Comparison(temperature, draft_length, tuple(runs[draft_length]), tuple(runs[0]))


async def _timed(request: Awaitable[GenerationResult]) -> Run:
    started = time.perf_counter()
    result = await request
    return Run(seconds=time.perf_counter() - started, result=result)
