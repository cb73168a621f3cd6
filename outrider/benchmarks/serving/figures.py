"""Figures of a run computed from its records, in the keys that users of `vllm bench serve` know, and a few of our own.

Owns the arithmetic. Ours, where that tool has none: acceptance (of judged tokens), tokens a second of one user, and
where the time of a step went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from outrider.benchmarks.samples import ratio, statistics_of
from outrider.benchmarks.schema import Series
from outrider.benchmarks.serving.records import Record, Run
from outrider.generation import GenerationResult

STAGES = ("draft", "target", "accept", "wire")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation statistics over many requests. Shares are None if nothing was drafted."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_judged_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def acceptance(self) -> float | None:
        """Accepted by judged tokens."""
        return ratio(self.num_accepted_tokens, self.num_judged_tokens)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted by drafted tokens."""
        return ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens gained by a step with a draft, recovered or bonus included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


def speculation_of(records: Iterable[Record]) -> Speculation:
    """Sums over requests of what the coordinator counted."""
    histogram: Counter[int] = Counter()
    stats = [record.result.speculation for record in records if record.result is not None]
    for found in stats:
        histogram.update(dict(enumerate(found.acceptance_histogram)))
    return Speculation(
        num_drafts=sum(histogram.values()),
        num_draft_tokens=sum(found.num_draft_tokens for found in stats),
        num_accepted_tokens=sum(found.num_accepted_tokens for found in stats),
        num_judged_tokens=sum(found.num_judged_tokens for found in stats),
        accepted_per_position=tuple(
            sum(count for length, count in histogram.items() if length > position)
            for position in range(max(histogram, default=0))
        ),
    )


def measured_series(runs: Sequence[Run], arm: str) -> tuple[Series, ...]:
    """Raw samples of all runs of one arm, labelled with it."""
    records = [record for run in runs for record in run.completed]
    per_token = [record.time_per_output_token for record in records]
    samples: dict[tuple[str, str], list[float]] = {
        ("ttft", "ms"): [1e3 * value for r in records if (value := r.time_to_first_token) is not None],
        ("tpot", "ms"): [1e3 * value for value in per_token if value is not None],
        ("itl", "ms"): [1e3 * gap for record in records for gap in record.gaps],
        ("e2el", "ms"): [1e3 * record.latency for record in records],
        ("user_throughput", "tok/s"): [1 / value for value in per_token if value],
        ("output_throughput", "tok/s"): [run.output_throughput for run in runs],
        ("until_all_finished", "ms"): [
            1e3 * value for run in runs if (value := run.time_per_token_until_all_finished) is not None
        ],
        ("after_first_tokens", "ms"): [
            1e3 * value for run in runs if (value := run.time_per_token_after_the_first) is not None
        ],
        **_stage_samples([record.result for record in records if record.result is not None]),
    }
    return tuple(Series(name, unit, tuple(values), {"arm": arm}) for (name, unit), values in samples.items())


def _stage_samples(results: Sequence[GenerationResult]) -> dict[tuple[str, str], list[float]]:
    """One sample a request: milliseconds of its prefill by stage, and of its decode steps by stage and step.

    The prefill ends with the first token, and so does the first step.
    """
    decoding = [result for result in results if result.speculation.num_steps > 1]
    samples = {
        ("prefill_total", "ms"): [1e3 * (r.timing.first_token - r.timing.queue) for r in results],
        ("decode_total", "ms"): [_by_step(r, r.timing.total - r.timing.first_token) for r in decoding],
    }
    for stage in STAGES:
        of_stage = attrgetter(stage)
        samples[f"prefill_{stage}", "ms"] = [1e3 * of_stage(r.timing.prefill) for r in results]
        samples[f"decode_{stage}", "ms"] = [
            _by_step(r, of_stage(r.timing) - of_stage(r.timing.prefill)) for r in decoding
        ]
    return samples


def _by_step(result: GenerationResult, seconds: float) -> float:
    """Milliseconds of one decode step."""
    return 1e3 * seconds / (result.speculation.num_steps - 1)


def vllm_keys(runs: Sequence[Run]) -> dict[str, Any]:
    """The keys of `vllm bench serve --save-result` that hold what was measured, and `outrider_*` for what is ours."""
    records = [record for run in runs for record in run.completed]
    duration = sum(run.duration for run in runs)
    total_input = sum(record.num_prompt_tokens for record in records)
    total_output = sum(record.num_tokens for record in records)
    return {
        "duration": duration,
        "completed": len(records),
        "failed": sum(len(run.records) for run in runs) - len(records),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(records) / duration,
        "request_goodput": None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": max(_busiest_second(run.completed) for run in runs),
        "max_concurrent_requests": max(_most_at_once(run.completed) for run in runs),
        "outrider_client_load": max(run.client_load for run in runs),
        **_latency_keys(runs),
        **_speculation_keys(speculation_of(records)),
    }


def detailed_keys(runs: Sequence[Run]) -> dict[str, Any]:
    """The keys of `--save-detailed`: one entry a request, times in seconds."""
    records = [record for run in runs for record in run.records]
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_tokens for record in records],
        "ttfts": [record.time_to_first_token or 0.0 for record in records],
        "start_times": [record.sent_at for record in records],
        "itls": [list(record.gaps) for record in records],
        "generated_texts": [record.result.text if record.result else "" for record in records],
        "errors": [record.error for record in records],
    }


def _latency_keys(runs: Sequence[Run]) -> dict[str, float | None]:
    keys: dict[str, float | None] = {}
    series = {item.name: item for item in measured_series(runs, "")}
    for name in ("ttft", "tpot", "itl", "e2el"):
        found = statistics_of(series[name].samples)
        for statistic in ("mean", "median", "std", "p90", "p99"):
            keys[f"{statistic}_{name}_ms"] = None if found is None else getattr(found, statistic)
    return keys


def _speculation_keys(speculation: Speculation) -> dict[str, Any]:
    if not speculation.num_drafts:
        return {}
    rate = speculation.acceptance_rate
    return {
        "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
        "spec_decode_acceptance_length": speculation.acceptance_length,
        "spec_decode_num_drafts": speculation.num_drafts,
        "spec_decode_draft_tokens": speculation.num_draft_tokens,
        "spec_decode_accepted_tokens": speculation.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": [
            count / speculation.num_drafts for count in speculation.accepted_per_position
        ],
        "outrider_acceptance": speculation.acceptance,
    }


def _busiest_second(records: Sequence[Record]) -> int:
    """Most output tokens in any whole second of a run."""
    seconds: Counter[int] = Counter()
    for record in records:
        for moment, count in zip(record.token_times, record.token_counts, strict=True):
            seconds[int(moment)] += count
    return max(seconds.values(), default=0)


def _most_at_once(records: Sequence[Record]) -> int:
    """Most requests under way at any moment; one that ends as another begins does not count twice."""
    changes = sorted(change for r in records for change in ((r.sent_at, 1), (r.ended_at, -1)))
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most
