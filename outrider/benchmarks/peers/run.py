"""Peers in turn, each in its own process, and what is said of them.

Owns the order and the gate: every peer must say what the first one says, token by token, or its row says how many
prompts it did not. (In bfloat16 near ties may fall either way; a synthetic pair has none.)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.peers.engines import ENGINES, NEEDS, Pair
from outrider.benchmarks.samples import median, ratio
from outrider.benchmarks.schema import Result, Series
from outrider.errors import ConfigError

Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """Workload of every peer."""

    engines: tuple[str, ...]
    pair: Pair
    prompts: tuple[Prompt, ...]
    num_tokens: int = 128
    num_warmups: int = 1
    packages: str | None = None
    """Folder of packages that the peers alone see, such as an unpacked vLLM with the versions that it needs."""

    def __post_init__(self) -> None:
        for name in self.engines:
            if name not in ENGINES:
                raise ConfigError("--peer", f"{name!r} is none of {', '.join(ENGINES)}")
        if self.num_tokens < 2:
            raise ConfigError(
                "--output-len", f"must be at least 2, not {self.num_tokens}: the first token is the prefill's"
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one peer."""

    engine: str
    ms_per_token: tuple[float, ...]
    """Of the prompts that go together, the first token left out."""
    first_ms: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]
    """Of each prompt."""
    all_ms: tuple[float, ...] = ()
    """A token until all that go together have finished, prefill included."""


def installed(packages: str | None = None) -> tuple[str, ...]:
    """Peers whose package is there, or in a folder of packages."""
    return tuple(name for name, package in NEEDS.items() if _is_found(package, packages))


def _is_found(package: str, folder: str | None) -> bool:
    in_folder = folder is not None and PathFinder.find_spec(package, [folder]) is not None
    return in_folder or importlib.util.find_spec(package) is not None


def run_plan(plan: Plan, *, on_done: Callable[[], None] = lambda: None) -> list[Outcome]:
    """One after the other; `ConfigError` names the peer that failed and its last line."""
    outcomes = []
    for engine in plan.engines:
        outcomes.append(_run_one(plan, engine))
        on_done()
    return outcomes


def _run_one(plan: Plan, engine: str) -> Outcome:
    job = {
        "engine": engine,
        "pair": dataclasses.asdict(plan.pair),
        "prompts": [list(prompt) for prompt in plan.prompts],
        "num_tokens": plan.num_tokens,
        "num_warmups": plan.num_warmups,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "outrider.benchmarks.peers"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        env=_environment(plan.packages),
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError("--peer", f"{engine} failed: {last[0]}")
    return _read(engine, json.loads(done.stdout.strip().splitlines()[-1]), plan.num_tokens)


def _environment(packages: str | None) -> dict[str, str]:
    """Of a peer's process, in which the folder of packages comes before all others."""
    if packages is None:
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))}


def _read(engine: str, answers: Sequence[dict[str, Any]], num_tokens: int) -> Outcome:
    return Outcome(
        engine,
        tuple(1e3 * (one["whole_s"] - one["first_s"]) / (num_tokens - 1) for one in answers),
        tuple(1e3 * one["first_s"] for one in answers),
        tuple(tuple(tokens) for one in answers for tokens in one["tokens"]),
        tuple(1e3 * one["whole_s"] / num_tokens for one in answers),
    )


def num_different(outcome: Outcome, reference: Outcome) -> int:
    """Prompts after which the two say different tokens."""
    return sum(ours != theirs for ours, theirs in zip(outcome.tokens, reference.tokens, strict=True))


def to_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, float, float, float, str]]:
    """(peer, first token ms, ms a token, tokens a second, prompts as the first peer)."""
    rows = []
    for outcome in outcomes:
        milliseconds = median(outcome.ms_per_token) or 0.0
        same = len(outcome.tokens) - num_different(outcome, outcomes[0])
        per_second = ratio(1e3, milliseconds) or 0.0
        rows.append(
            (outcome.engine, median(outcome.first_ms) or 0.0, milliseconds, per_second, f"{same}/{len(outcome.tokens)}")
        )
    return rows


def to_result(outcomes: Sequence[Outcome], plan: Plan, *, name: str, configuration: dict[str, Any]) -> Result:
    """The result to save."""
    series = []
    for outcome in outcomes:
        series.append(Series("ttft", "ms", outcome.first_ms, {"engine": outcome.engine}))
        series.append(Series("tpot", "ms", outcome.ms_per_token, {"engine": outcome.engine}))
        series.append(Series("until_all_finished", "ms", outcome.all_ms, {"engine": outcome.engine}))
    pair = {key: value for key, value in dataclasses.asdict(plan.pair).items() if key not in {"target", "draft"}}
    return Result(
        kind="peers",
        name=name,
        created_at=now(),
        environment=describe_environment(plan.pair.device),
        configuration={
            **configuration,
            **pair,
            "num_prompts": len(plan.prompts),
            "input_lens": sorted({len(prompt) for prompt in plan.prompts}),
            "output_len": plan.num_tokens,
        },
        series=tuple(series),
        figures={"prompts_that_differ": {one.engine: num_different(one, outcomes[0]) for one in outcomes}},
    )
