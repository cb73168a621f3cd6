"""Peers in turn, each in its own process, and what is said of them.

Owns the order and the gate: every peer must say what the first one says, token by token, or its row says how many
prompts it did not. (In bfloat16 near ties may fall either way; a synthetic pair has none.)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any

from outrider.benchmarks.environment import describe_environment, now
from outrider.benchmarks.peers.engines import ENGINES, NEEDS, ONE_USER, SPECULATIVE, Pair, num_gpus, one_user_error
from outrider.benchmarks.samples import median, ratio
from outrider.benchmarks.schema import Label, Result, Series
from outrider.errors import ConfigError

Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of one number of users."""

    num_users: int
    groups: tuple[tuple[Prompt, ...], ...]
    """A group for each repetition, whose prompts go together."""


def make_loads(
    num_users: Iterable[int], num_runs: int, num_prompts: int, make_prompts: Callable[[int], Sequence[Prompt]]
) -> tuple[Load, ...]:
    """A load for each number of users, in order: minimum numbers of repetitions and of prompts, all different."""
    loads = []
    for users in dict.fromkeys(num_users):
        if users < 1:
            raise ConfigError("--max-concurrency", f"must be at least 1, not {users}")
        count = users * max(num_runs, math.ceil(num_prompts / users))
        prompts = tuple(make_prompts(count))
        loads.append(Load(users, tuple(prompts[start : start + users] for start in range(0, count, users))))
    return tuple(loads)


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """Workload of every peer."""

    engines: tuple[str, ...]
    pair: Pair
    """Pair whose number of users is that of the largest load."""
    loads: tuple[Load, ...]
    num_tokens: int = 128
    num_warmups: int = 1
    """Unmeasured repetitions of each load."""
    packages: str | None = None
    """Folder of packages that the peers alone see, such as an unpacked vLLM with the versions that it needs."""
    log: Path | None = None
    """File of all that the peers print."""

    def __post_init__(self) -> None:
        for name in self.engines:
            if name not in ENGINES:
                raise ConfigError("--peer", f"{name!r} is none of {', '.join(ENGINES)}")
            if name in ONE_USER and self.most_users > 1:
                raise one_user_error(name)
            if name in SPECULATIVE and self.pair.draft is None:
                raise ConfigError("--draft-model", f"is needed by {name}")
            if self.pair.load_format != "safetensors" and NEEDS[name] != "vllm":
                raise ConfigError("--load-format", f"must be safetensors for {name}, not {self.pair.load_format!r}")
        if not self.engines:
            raise ConfigError("--peer", "names no engine, and none that fits is installed")
        if not self.loads:
            raise ConfigError("--max-concurrency", "names no number of users")
        if self.num_tokens < 2:
            raise ConfigError(
                "--output-len", f"must be at least 2, not {self.num_tokens}: the first token is the prefill's"
            )

    @property
    def most_users(self) -> int:
        """Users of the largest load."""
        return max((load.num_users for load in self.loads), default=0)


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """Outcome of one peer with one number of users."""

    engine: str
    ms_per_token: tuple[float, ...]
    """Mean over the prompts that go together, the first token left out."""
    first_ms: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]
    """New tokens of each prompt."""
    all_ms: tuple[float, ...] = ()
    """A token until all that go together have finished, prefill included."""
    num_users: int = 1
    version: str = ""
    """Version of the engine's package."""
    after_first_ms: tuple[float, ...] = ()
    """Times as in ``all_ms``, without the first token."""


def installed(packages: str | None = None) -> tuple[str, ...]:
    """Peers whose package is there, or in a folder of packages."""
    return tuple(name for name, package in NEEDS.items() if _is_found(package, packages))


def _is_found(package: str, folder: str | None) -> bool:
    in_folder = folder is not None and PathFinder.find_spec(package, [folder]) is not None
    return in_folder or importlib.util.find_spec(package) is not None


def run_plan(plan: PeerPlan, *, on_done: Callable[[], None] = lambda: None) -> list[PeerOutcome]:
    """One after the other, each with all numbers of users; `ConfigError` names the peer that failed and its last line.

    The log is written anew.
    """
    outcomes: list[PeerOutcome] = []
    with _log(plan.log) as log:
        for engine in plan.engines:
            outcomes += _run_one(plan, engine, log)
            on_done()
    return outcomes


def _log(path: Path | None) -> IO[bytes]:
    """A file that processes write to and this one reads."""
    if path is None:
        return tempfile.TemporaryFile()
    try:
        path.write_bytes(b"")
        return path.open("a+b")
    except OSError as error:
        raise ConfigError("--log", f"{path} cannot be written: {error.strerror}") from error


def _run_one(plan: PeerPlan, engine: str, log: IO[bytes]) -> list[PeerOutcome]:
    job = {
        "engine": engine,
        "pair": {**dataclasses.asdict(plan.pair), "num_users": plan.most_users},
        "loads": [[[list(prompt) for prompt in group] for group in load.groups] for load in plan.loads],
        "num_tokens": plan.num_tokens,
        "num_warmups": plan.num_warmups,
    }
    began = log.seek(0, os.SEEK_END)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "outrider.benchmarks.peers"],
        input=json.dumps(job).encode(),
        stdout=subprocess.PIPE,
        stderr=log,
        check=False,
        env=_environment(plan.packages),
    )
    answer = _find_answer(engine, done.stdout.decode(errors="replace"))
    if answer is None:
        log.seek(began)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        where = "--log FILE keeps all that it printed" if plan.log is None else f"{plan.log} has all that it printed"
        raise ConfigError("--peer", f"{engine} failed: {last[0]} ({where})")
    return [
        read_outcome(engine, load.num_users, answer["version"], timed, plan.num_tokens)
        for load, timed in zip(plan.loads, answer["loads"], strict=True)
    ]


def _find_answer(engine: str, text: str) -> dict[str, Any] | None:
    """The last line that is a peer's answer, whatever else was printed."""
    for line in reversed(text.splitlines()):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and content.get("engine") == engine:
            return content
    return None


def _environment(packages: str | None) -> dict[str, str]:
    """Environment of a peer's process, in which the folder of packages comes before all others."""
    if packages is None:
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))}


def read_outcome(
    engine: str, num_users: int, version: str, timed: Sequence[dict[str, Any]], num_tokens: int
) -> PeerOutcome:
    """Outcome from the times of each repetition, in seconds."""
    after_s = [one["whole_s"] - one["first_s"] for one in timed]
    streams_s = [
        until_all if one["streams_s"] is None else one["streams_s"]
        for one, until_all in zip(timed, after_s, strict=True)
    ]
    return PeerOutcome(
        engine,
        tuple(1e3 * seconds / (num_tokens - 1) for seconds in streams_s),
        tuple(1e3 * one["first_s"] for one in timed),
        tuple(tuple(tokens) for one in timed for tokens in one["tokens"]),
        tuple(1e3 * one["whole_s"] / num_tokens for one in timed),
        num_users,
        version,
        tuple(1e3 * seconds / (num_tokens - 1) for seconds in after_s),
    )


def num_different(outcome: PeerOutcome, reference: PeerOutcome) -> int:
    """Prompts after which the two say different tokens."""
    return sum(ours != theirs for ours, theirs in zip(outcome.tokens, reference.tokens, strict=True))


def _different(outcome: PeerOutcome, outcomes: Sequence[PeerOutcome]) -> int:
    """Prompts that differ from the first peer's with as many users."""
    return num_different(outcome, next(one for one in outcomes if one.num_users == outcome.num_users))


def tokens_per_gpu(num_users: int, all_ms: float | None, gpus: int | None) -> float | None:
    """Tokens a second of all users, from the time of a token until all have finished; None on a CPU."""
    return ratio(ratio(1e3 * num_users, all_ms), gpus)


def to_rows(
    outcomes: Sequence[PeerOutcome], pair: Pair
) -> list[tuple[str, int, float, float, float, float | str, str]]:
    """(peer, users, first token ms, ms a token, tokens/s of a user, of a GPU, prompts as the first peer)."""
    rows = []
    for outcome in outcomes:
        milliseconds = median(outcome.ms_per_token) or 0.0
        of_gpu = tokens_per_gpu(outcome.num_users, median(outcome.all_ms), num_gpus(outcome.engine, pair))
        same = len(outcome.tokens) - _different(outcome, outcomes)
        rows.append(
            (
                outcome.engine,
                outcome.num_users,
                median(outcome.first_ms) or 0.0,
                milliseconds,
                ratio(1e3, milliseconds) or 0.0,
                "" if of_gpu is None else of_gpu,
                f"{same}/{len(outcome.tokens)}",
            )
        )
    return rows


def to_result(outcomes: Sequence[PeerOutcome], plan: PeerPlan, *, name: str, configuration: dict[str, Any]) -> Result:
    """The result to save."""
    series = []
    for outcome in outcomes:
        labels: dict[str, Label] = {"engine": outcome.engine, "num_users": outcome.num_users}
        series.append(Series("ttft", "ms", outcome.first_ms, labels))
        series.append(Series("tpot", "ms", outcome.ms_per_token, labels))
        series.append(Series("until_all_finished", "ms", outcome.all_ms, labels))
        series.append(Series("after_first_tokens", "ms", outcome.after_first_ms, labels))
    pair = plan.pair
    return Result(
        kind="peers",
        name=name,
        created_at=now(),
        environment=describe_environment(pair.device),
        configuration={
            **configuration,
            "device": pair.device,
            "dtype": pair.dtype,
            "load_format": pair.load_format,
            "gpu_memory_utilization": pair.gpu_memory_utilization,
            "engines": {one.engine: _facts(one, pair) for one in outcomes},
            "num_users": [load.num_users for load in plan.loads],
            "input_lens": sorted({len(prompt) for load in plan.loads for group in load.groups for prompt in group}),
            "output_len": plan.num_tokens,
        },
        series=tuple(series),
        figures={
            "prompts_that_differ": [
                {
                    "engine": one.engine,
                    "num_users": one.num_users,
                    "num_prompts": len(one.tokens),
                    "num_different": _different(one, outcomes),
                }
                for one in outcomes
            ]
        },
    )


def _facts(outcome: PeerOutcome, pair: Pair) -> dict[str, Any]:
    """Facts of one engine."""
    return {
        "version": outcome.version,
        "num_gpus": num_gpus(outcome.engine, pair),
        "num_speculative_tokens": pair.draft_length if outcome.engine in SPECULATIVE else 0,
    }
