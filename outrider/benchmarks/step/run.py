"""Starts the three processes, lets them generate, and takes from each step what its two forwards cost.

A step is timed by its caller, between one delta and the next; the forwards take a known time, so what is left is the
wire, the threads and the coordinator. Where it went comes from moments noted in each process (``stamps``), and what it
costs a coordinator that serves many from the processor time of its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from outrider.benchmarks.child_process import child_process
from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.schema import Label, Result, Series
from outrider.benchmarks.step.stamps import PARTS, SIDES, TURN, Moments
from outrider.benchmarks.step.stand_in import follow
from outrider.client import AsyncClient
from outrider.demo import TARGET
from outrider.errors import ConfigError, ProtocolError
from outrider.generation import GenerationResult

TCP, UNIX = "tcp", "unix"
STAGES = ("draft", "target", "accept", "wire")
"""Stages of `Timing`, in which users are told a step's time."""
_SERVICE = "outrider.benchmarks.step.service"
_PROMPT = (11, 7, 5, 3)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Numbers of sessions and temperatures to time."""

    num_sessions: tuple[int, ...] = (1, 32)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """0: no evidence travels; above: a support of 64 ids a draft token."""
    over: str = TCP
    draft_ms: float = 3.0
    """Duration of a proposal, however many sessions share it."""
    target_ms: float = 5.0
    acceptance: float = 0.75
    num_speculative_tokens: int = 4
    """0: the target alone."""
    num_pinned_cpus: int | None = None
    """Number of busy-polling processors of each process, as in its setting."""
    num_samples: int = 300
    """Steps of each session."""
    num_warmups: int = 50

    @property
    def num_cases(self) -> int:
        """Combinations."""
        return len(self.num_sessions) * len(self.temperatures)

    @property
    def forwards_ms(self) -> float:
        """Both forwards of a step."""
        return self.target_ms + (self.draft_ms if self.num_speculative_tokens else 0)

    def __post_init__(self) -> None:
        if self.over not in (TCP, UNIX):
            raise ConfigError("over", f"must be {TCP} or {UNIX}, not {self.over}")


@dataclass(frozen=True, slots=True)
class _TimedResult:
    """Output that one caller received."""

    result: GenerationResult
    gaps: tuple[float, ...]
    """Seconds of each timed step."""


@dataclass(slots=True)
class _Stack:
    """The three processes."""

    address: str
    """The coordinator's."""
    coordinator: asyncio.subprocess.Process
    stamps: tuple[Path, ...]
    """Files of time stamps, one a process; each exists once its process has ended."""
    clock_ticks: int = field(default_factory=lambda: os.sysconf("SC_CLK_TCK"))

    def processor_s(self) -> float:
        """Seconds of processor time that the coordinator's process has taken, all threads together."""
        fields = Path(f"/proc/{self.coordinator.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / self.clock_ticks


def run_plan(plan: StepPlan, *, on_done: Callable[[], None] = lambda: None) -> tuple[Series, ...]:
    """Time everything, in milliseconds."""
    return uvloop.run(_run(plan, on_done))


async def _run(plan: StepPlan, on_done: Callable[[], None]) -> tuple[Series, ...]:
    series: list[Series] = []
    windows: list[_Window] = []
    with tempfile.TemporaryDirectory() as folder:
        async with _stack(plan, Path(folder)) as stack, AsyncClient(stack.address) as client:
            for temperature in plan.temperatures:
                for num_sessions in plan.num_sessions:
                    began = time.perf_counter_ns()
                    measured = await _measure(stack, client, plan, temperature, num_sessions)
                    windows.append(_Window(began, time.perf_counter_ns(), measured[0].labels))
                    series += measured
                    on_done()
        moments = Moments(stack.stamps)
    for window in windows:
        parts = moments.parts(window.began_ns, window.ended_ns, num_skipped=plan.num_warmups)
        series += [Series(name, "ms", tuple(values), window.labels) for name, values in parts.items()]
    return tuple(series)


@dataclass(frozen=True, slots=True)
class _Window:
    """Time span of a measured case."""

    began_ns: int
    ended_ns: int
    labels: dict[str, Label]


async def _measure(
    stack: _Stack, client: AsyncClient, plan: StepPlan, temperature: float, num_sessions: int
) -> list[Series]:
    before = stack.processor_s()
    results = await asyncio.gather(*(_generate(client, plan, temperature, seed) for seed in range(num_sessions)))
    spent = stack.processor_s() - before
    labels: dict[str, Label] = {"num_sessions": num_sessions, "temperature": temperature, "over": plan.over}
    steps = [one.result.speculation.num_steps for one in results]
    samples = {
        "between_forwards": [1e3 * gap - plan.forwards_ms for one in results for gap in one.gaps],
        "coordinator_processor": [1e3 * spent / sum(steps)],
    }
    for stage in STAGES:
        samples[stage] = [
            1e3 * getattr(one.result.timing, stage) / count for one, count in zip(results, steps, strict=True)
        ]
    return [Series(name, "ms", tuple(values), labels) for name, values in samples.items()]


async def _generate(client: AsyncClient, plan: StepPlan, temperature: float, seed: int) -> _TimedResult:
    # Two more than are timed: the first step is a prefill, the last may draft less.
    num_steps = plan.num_warmups + plan.num_samples + 2
    times: list[float] = []
    result = None
    stream = client.stream(
        prompt_token_ids=_PROMPT,
        max_tokens=num_steps * (plan.num_speculative_tokens + 1),
        temperature=temperature,
        seed=seed,
        ignore_eos=True,
        acceptance_method="rejection",
        num_speculative_tokens=plan.num_speculative_tokens,
    )
    async for delta in stream:
        if delta.token_ids:
            times.append(time.perf_counter())
        result = delta.result
    if result is None or (temperature == 0 and result.token_ids != follow(_PROMPT[-1], len(result.token_ids))):
        raise ProtocolError("the generation is not what the stand-in target says")
    timed = times[plan.num_warmups : plan.num_warmups + plan.num_samples + 1]
    return _TimedResult(result, tuple(later - earlier for earlier, later in itertools.pairwise(timed)))


@contextlib.asynccontextmanager
async def _stack(plan: StepPlan, folder: Path) -> AsyncIterator[_Stack]:
    """All three, until they are not needed any more."""
    pinned = () if plan.num_pinned_cpus is None else ("--pinned-cpus", str(plan.num_pinned_cpus))

    def service(role: str, *arguments: str) -> contextlib.AbstractAsyncContextManager[tuple[str, Any]]:
        address = "127.0.0.1:0" if plan.over == TCP else f"unix:{folder}/{role}"
        shared = (*pinned, "--acceptance", str(plan.acceptance), "--stamps", f"{folder}/{role}.json")
        return child_process("-P", "-m", _SERVICE, role, address, *shared, *arguments, is_quiet=True)

    async with (
        service("draft", "--busy-ms", str(plan.draft_ms)) as (draft, _),
        service("target", "--busy-ms", str(plan.target_ms)) as (target, _),
        service("coordinator", "--draft-address", draft, "--target-address", target, "--tokenizer", str(TARGET)) as (
            address,
            process,
        ),
    ):
        yield _Stack(address, process, tuple(folder.joinpath(f"{role}.json") for role in (*SIDES, "coordinator")))


def to_rows(series: tuple[Series, ...]) -> list[tuple[Label, ...]]:
    """(sessions, temperature, median and p99 between forwards, coordinator's processor time, then the stages)."""
    rows: list[tuple[Label, ...]] = []
    for item in series:
        found = item.statistics
        if item.name != "between_forwards" or found is None:
            continue
        means = [_mean(series, name, item.labels) for name in ("coordinator_processor", *STAGES)]
        rows.append((item.labels["num_sessions"], item.labels["temperature"], found.median, found.p99, *means))
    return rows


def to_part_rows(series: tuple[Series, ...]) -> list[tuple[Label, ...]]:
    """(sessions, temperature, side, then the medians of its parts and of the coordinator's turn after it)."""
    rows: list[tuple[Label, ...]] = []
    for item in series:
        if item.name == "between_forwards":
            known = {found.name: found for found in series if found.labels == item.labels}
            for side in SIDES:
                if known[f"{side}_{PARTS[0]}"].statistics is None:
                    continue  # nothing was asked of it
                medians = [_median(known[f"{side}_{part}"]) for part in (*PARTS, TURN)]
                rows.append((item.labels["num_sessions"], item.labels["temperature"], side, *medians))
    return rows


def _median(series: Series) -> float:
    return 0.0 if series.statistics is None else series.statistics.median


def _mean(series: tuple[Series, ...], name: str, labels: dict[str, Label]) -> float:
    found = next(item.statistics for item in series if item.name == name and item.labels == labels)
    return 0.0 if found is None else found.mean


def to_result(series: tuple[Series, ...], plan: StepPlan, *, name: str) -> Result:
    """The result to save."""
    configuration: dict[str, Any] = {
        "draft_ms": plan.draft_ms,
        "target_ms": plan.target_ms,
        "acceptance": plan.acceptance,
        "num_speculative_tokens": plan.num_speculative_tokens,
        "num_pinned_cpus": "unset" if plan.num_pinned_cpus is None else plan.num_pinned_cpus,
        "num_samples": plan.num_samples,
        "num_warmups": plan.num_warmups,
        "models": "stand-ins of known cost",
    }
    return Result(
        kind="step",
        name=name,
        created_at=now(),
        environment=describe_environment("cpu"),
        configuration=configuration,
        series=series,
    )
