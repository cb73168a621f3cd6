"""Comparison of README: Outrider and vLLM with the same models on the same kind of GPU, with and without a draft model.

Selects the results by their names, so that a new measurement replaces an old one without a change here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.benchmarks.samples import ratio
from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import Row, device, number, table
from outrider.benchmarks.tables.peers import Measurement, measurements

_USERS_OF_TABLE = (1, 8, 32, 128)
_OWN_ENGINE = "Outrider"
_RUN = "h200-http-8b-1b"
"""Result of all systems: their servers were measured over HTTP by one client, users by users in turn."""
_ENGINES = {
    "outrider": _OWN_ENGINE,
    "outrider-speculative": _OWN_ENGINE,
    "vllm": "vLLM",
    "vllm-speculative": "vLLM",
}
"""Engines of the result in the order of the table, and their names in it."""
_LONGEST = 8
"""Draft tokens per step at most, by default."""


@dataclass(frozen=True, slots=True)
class Point:
    """Medians of one system with one number of users."""

    per_gpu: float
    """Tokens per second of all users, divided by the number of GPUs."""
    per_user: float
    """Tokens per second of one user after the first token."""
    ms_per_token: float
    """Milliseconds per token until all users have finished, less the time of their first tokens."""


@dataclass(frozen=True, slots=True)
class System:
    """Measurements of one engine, with or without a draft model."""

    name: str
    is_plain: bool
    points: Mapping[int, Point]
    """Points by number of users."""


def compared_systems(results: Sequence[Result]) -> list[System]:
    """Systems of the comparison that were measured: Outrider's first, each without and with a draft model."""
    found = [one for result in _chosen(results) for one in measurements(result)]
    systems = [_system(engine, [one for one in found if one.engine == engine]) for engine in _ENGINES]
    return [system for system in systems if system.points]


def _chosen(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.name == _RUN]


def _system(engine: str, found: Sequence[Measurement]) -> System:
    points = {
        one.num_users: Point(one.tokens_per_gpu, one.tokens_per_user, one.after_first_ms)
        for one in found
        if one.tokens_per_gpu and one.tokens_per_user and one.after_first_ms
    }
    version = "" if engine.startswith("outrider") or not found else f" {found[0].version.partition('+')[0]}"
    is_plain = not engine.endswith("-speculative")
    name = _named(_ENGINES[engine] + version, is_plain=is_plain)
    return System(name, is_plain, dict(sorted(points.items())))


def _named(engine: str, *, is_plain: bool) -> str:
    return f"{engine}, target alone" if is_plain else f"{engine}, with the draft"


def comparison_table(results: Sequence[Result]) -> str:
    """README's table: milliseconds per token by number of users, a column per system. Empty without results."""
    systems = compared_systems(results)
    if not systems:
        return ""
    heads = ["users", *(system.name for system in systems), "Outrider's gain from drafting"]
    rows = [_row(users, systems) for users in _USERS_OF_TABLE]
    return table("Milliseconds per token until all users have finished", heads, rows, [_caption(results)], of="")


def _row(users: int, systems: Sequence[System]) -> Row:
    times = [system.points[users].ms_per_token if users in system.points else None for system in systems]
    return [str(users), *(number(milliseconds, 2) for milliseconds in times), number(_gain(users, systems), 2)]


def _gain(users: int, systems: Sequence[System]) -> float | None:
    times = {system.name: system.points[users].ms_per_token for system in systems if users in system.points}
    plain, drafted = (times.get(_named(_OWN_ENGINE, is_plain=is_plain)) for is_plain in (True, False))
    return ratio(plain, drafted)


def _caption(results: Sequence[Result]) -> str:
    (chosen,) = _chosen(results)
    length = chosen.configuration["engines"].get("vllm-speculative", {}).get("num_speculative_tokens", 0)
    theirs = f"vLLM drafts {length} tokens per step, " if length else ""
    return (
        f"{device(chosen)}: one GPU for both models, 8B and 1B shapes in bfloat16 with synthetic weights (about 0.8 of "
        "the judged draft tokens are accepted), greedy, 128 tokens in and 256 out, without the time to first token. "
        f"Medians. Both servers over HTTP with one client, measured on {chosen.created_at[:10]} within half an hour, "
        f"Outrider at commit {chosen.environment.commit[:9]}. {theirs}Outrider 0 to {_LONGEST}, as it chooses."
    )
