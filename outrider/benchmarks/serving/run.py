"""One serving benchmark from gate to result: arms in turn, the same requests for each.

Owns the order: gate, warm-up, then run after run, the arms interleaved, so that a machine that slows down meanwhile
slows them all. Starts no process.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.samples import median, ratio, thinned
from outrider.benchmarks.schema import Result, Series
from outrider.benchmarks.serving.block import format_block
from outrider.benchmarks.serving.figures import detailed_keys, measured_series, vllm_keys
from outrider.benchmarks.serving.gate import GateReport, check_exactness
from outrider.benchmarks.serving.gpus import describe_placement, num_gpus
from outrider.benchmarks.serving.load import Decoding, run_load
from outrider.benchmarks.serving.records import Run
from outrider.benchmarks.serving.workload import Prompt, Traffic, require_capacity
from outrider.client import AsyncClient
from outrider.errors import ConfigError, UnavailableError
from outrider.generation import ModelInfo
from outrider.types import SamplingParams

SPECULATION, BASELINE = "speculation", "baseline"
_MOST_SAMPLES = 256
"""Bound on the samples of one series in a result's file."""


def fixed_arm(length: int) -> str:
    """Name of an arm with a fixed draft length."""
    return f"K={length}"


def sampled_arm(params: SamplingParams) -> str:
    """Name of an arm with other sampling parameters."""
    name = f"T={params.temperature:g} p={params.top_p:g} k={params.top_k}"
    return name if params.grammar is None else f"{name} {params.grammar.kind.value}"


class RunLoad(Protocol):
    """Sends one load; `run_load` with a client, or `ClientProcesses.run_load`."""

    def __call__(
        self, prompts: Sequence[Prompt], traffic: Traffic, decoding: Decoding, *, on_done: Callable[[], None] = ...
    ) -> Awaitable[Run]:
        """Send every prompt when it is due."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Runs to perform."""

    prompts: tuple[Prompt, ...]
    traffic: Traffic
    decoding: Decoding
    num_runs: int = 1
    num_warmups: int = 1
    """Requests of each arm before anything is measured."""
    with_baseline: bool = False
    """The same requests without speculation, in turn with the others."""
    with_first_tokens: bool = False
    """Preceding run of the same requests for one token each, so that the time of decoding alone is known."""
    with_cached_prompts: bool = False
    """All runs find their prompts in the prefix cache, where the first warm-up puts them: only decoding is timed."""
    fixed_lengths: tuple[int, ...] = ()
    """Draft lengths of further arms, for a coordinator with ``draft_length: fixed``."""
    samplings: tuple[SamplingParams, ...] = ()
    """Temperature, top-p, top-k and grammar of further arms, with the speculation of the first."""
    num_gate_prompts: int = 2
    """0 leaves the gate out, and the result says so."""
    num_gate_tokens: int = 32
    tie_tolerance: float = 1e-3

    @property
    def num_requests(self) -> int:
        """Number of measured requests, over all runs and arms."""
        num_arms = 1 + self.with_baseline + len(self.fixed_lengths) + len(self.samplings)
        return len(self.prompts) * self.num_runs * num_arms

    def arms(self, draft_length: int) -> dict[str, Decoding]:
        """Decoding of each arm, in order."""
        speculation = dataclasses.replace(self.decoding, num_speculative_tokens=draft_length)
        arms = {SPECULATION: speculation}
        if self.with_baseline:
            arms[BASELINE] = dataclasses.replace(speculation, num_speculative_tokens=0)
        for length in self.fixed_lengths:
            arms[fixed_arm(length)] = dataclasses.replace(speculation, num_speculative_tokens=length)
        for params in self.samplings:
            arms[sampled_arm(params)] = dataclasses.replace(
                speculation,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                grammar=params.grammar,
            )
        return arms

    def with_prompts(self, prompts: Sequence[Prompt]) -> ServePlan:
        """The same with other prompts."""
        return dataclasses.replace(self, prompts=tuple(prompts))


@dataclass(frozen=True, slots=True)
class ServeOutcome:
    """Outcome of the runs."""

    info: ModelInfo
    gate: GateReport | None
    draft_length: int
    runs: dict[str, tuple[Run, ...]]
    """Runs by arm."""

    @property
    def speedups(self) -> tuple[float, ...]:
        """Run by run, output throughput with speculation over that without."""
        pairs = zip(self.runs[SPECULATION], self.runs.get(BASELINE, ()), strict=False)
        quotients = (ratio(ours.output_throughput, alone.output_throughput) for ours, alone in pairs)
        return tuple(quotient for quotient in quotients if quotient is not None)

    def num_different(self) -> int | None:
        """Greedy requests that said other tokens than without speculation, under the load that was on.

        Near ties may fall either way below float32. None without a baseline.
        """
        if BASELINE not in self.runs:
            return None
        ours, alone = (
            [record.result.token_ids if record.result else None for run in self.runs[arm] for record in run.records]
            for arm in (SPECULATION, BASELINE)
        )
        return sum(None not in {a, b} and a != b for a, b in zip(ours, alone, strict=True))


async def run_plan(
    client: AsyncClient,
    plan: ServePlan,
    *,
    on_done: Callable[[], None] = lambda: None,
    load: RunLoad | None = None,
    load_fixed: RunLoad | None = None,
) -> ServeOutcome:
    """Run it all; `GateError` when speculation changes greedy output, `UnavailableError` when requests failed.

    ``load`` sends the measured requests, by default the client does; ``load_fixed`` those of fixed draft lengths, to
    another coordinator of the same services.
    """
    load = load or partial(run_load, client)
    info = await client.model_info()
    draft_length = plan.decoding.num_speculative_tokens
    if draft_length is None:
        draft_length = info.num_speculative_tokens
    if plan.num_runs < 1:
        raise ConfigError("num_runs", f"must be at least 1, not {plan.num_runs}")
    require_capacity(plan.prompts, plan.decoding.max_tokens, info.max_model_len)
    gate = await _gate(client, plan, draft_length)
    salted = _salted(plan)
    arms = plan.arms(draft_length)
    fixed = {fixed_arm(length) for length in plan.fixed_lengths}
    loads = {arm: (load_fixed or load) if arm in fixed else load for arm in arms}
    for arm, decoding in arms.items():
        if plan.num_warmups:
            await loads[arm](plan.prompts[: plan.num_warmups], Traffic(), salted(decoding))
    runs: dict[str, list[Run]] = {arm: [] for arm in arms}
    for index in range(plan.num_runs):
        for arm in list(arms)[:: 1 if index % 2 == 0 else -1]:
            first_tokens = await _first_tokens_duration(plan, loads[arm], salted(arms[arm]))
            run = _whole(await loads[arm](plan.prompts, plan.traffic, salted(arms[arm]), on_done=on_done))
            runs[arm].append(dataclasses.replace(run, first_tokens_duration=first_tokens))
    return ServeOutcome(info, gate, draft_length, {arm: tuple(done) for arm, done in runs.items()})


async def _first_tokens_duration(plan: ServePlan, load: RunLoad, decoding: Decoding) -> float | None:
    """Seconds of the whole load with one token a request; None where the plan does not ask for it."""
    if not plan.with_first_tokens:
        return None
    one_token = dataclasses.replace(decoding, max_tokens=1)
    return _whole(await load(plan.prompts, plan.traffic, one_token)).duration


def _salted(plan: ServePlan) -> Callable[[Decoding], Decoding]:
    """Gives a run's decoding its cache salt. All runs send the same prompts, and none may find those of another in a
    prefix cache, unless the plan wants all to.
    """
    shared = _fresh_salt()

    def salted(decoding: Decoding) -> Decoding:
        return dataclasses.replace(decoding, cache_salt=shared if plan.with_cached_prompts else _fresh_salt())

    return salted


def _fresh_salt() -> str:
    return f"bench-{secrets.token_hex(8)}"


async def _gate(client: AsyncClient, plan: ServePlan, draft_length: int) -> GateReport | None:
    if not plan.num_gate_prompts:
        return None
    return await check_exactness(
        client,
        plan.prompts[: plan.num_gate_prompts],
        max_tokens=plan.num_gate_tokens,
        num_speculative_tokens=draft_length,
        tie_tolerance=plan.tie_tolerance,
    )


def _whole(run: Run) -> Run:
    """The run; an error if nothing of it came to its end."""
    if not run.completed:
        raise UnavailableError(f"no request came to its end; the first failed with {run.records[0].error}")
    return run


def texts(outcome: ServeOutcome, plan: ServePlan) -> list[str]:
    """The blocks to print, one an arm, and the comparison."""
    blocks = [
        format_block(vllm_keys(runs), plan.traffic, measured_series(runs, arm), _title(arm, outcome))
        for arm, runs in outcome.runs.items()
    ]
    if outcome.speedups:
        each = ", ".join(f"{value:.2f}" for value in outcome.speedups)
        differ = f" Requests that differ: {outcome.num_different()}." if plan.decoding.temperature == 0 else ""
        blocks.append(f"Speculation is {median(outcome.speedups):.2f} times as fast (median of {each}).{differ}")
    return blocks


def _title(arm: str, outcome: ServeOutcome) -> str:
    return "Serving Benchmark Result" if BASELINE not in outcome.runs else f"Serving Benchmark Result: {arm}"


def to_result(
    outcome: ServeOutcome,
    plan: ServePlan,
    *,
    name: str,
    device: str,
    configuration: Mapping[str, Any],
    gpus: int | None = None,
) -> Result:
    """The result to save; ``gpus`` where further replicas make more of them than the placement tells."""
    series = tuple(item for arm, runs in outcome.runs.items() for item in measured_series(runs, arm))
    if outcome.speedups:
        series += (Series("speedup", "times", outcome.speedups),)
    return Result(
        kind="serve",
        name=name,
        created_at=now(),
        environment=describe_environment(device),
        configuration={
            **configuration,
            **_configuration(outcome, plan),
            "placement": describe_placement(outcome.info, gpus),
            "num_gpus": num_gpus(outcome.info) if gpus is None else gpus,
        },
        series=tuple(dataclasses.replace(item, samples=thinned(item.samples, _MOST_SAMPLES)) for item in series),
        figures={arm: vllm_keys(runs) for arm, runs in outcome.runs.items()}
        | ({"requests_that_differ": outcome.num_different()} if plan.decoding.temperature == 0 else {}),
    )


def to_vllm_json(outcome: ServeOutcome, plan: ServePlan, arm: str = SPECULATION) -> dict[str, Any]:
    """One arm in the flat layout of `vllm bench serve --save-result --save-detailed`."""
    runs, rate = outcome.runs[arm], plan.traffic.request_rate
    return {
        "date": now(),
        "backend": "outrider",
        "endpoint_type": "outrider",
        "label": arm,
        "model_id": outcome.info.target_model,
        "tokenizer_id": outcome.info.target_model,
        "num_prompts": len(plan.prompts),
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": plan.traffic.burstiness,
        "max_concurrency": plan.traffic.max_concurrency,
        **vllm_keys(runs),
        **detailed_keys(runs),
    }


def _configuration(outcome: ServeOutcome, plan: ServePlan) -> dict[str, Any]:
    traffic: dict[str, Any] = dataclasses.asdict(plan.traffic)
    if traffic["request_rate"] == float("inf"):
        traffic["request_rate"] = "inf"
    lengths: Sequence[int] = sorted({len(prompt) for prompt in plan.prompts})
    return {
        "target_model": outcome.info.target_model,
        "draft_model": outcome.info.draft_model,
        "num_speculative_tokens": outcome.draft_length,
        "draft_length": outcome.info.draft_length_mode,
        "acceptance_method": plan.decoding.acceptance_method or outcome.info.acceptance_method.value,
        "num_prompts": len(plan.prompts),
        "input_lens": list(lengths),
        "num_runs": plan.num_runs,
        "num_warmups": plan.num_warmups,
        "cached_prompts": plan.with_cached_prompts,
        "traffic": traffic,
        "decoding": dataclasses.asdict(plan.decoding),
        "gate": None if outcome.gate is None else dataclasses.asdict(outcome.gate),
        "tie_tolerance": plan.tie_tolerance,
    }
