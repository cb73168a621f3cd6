"""Comparison of README: Outrider and vLLM with the same models on the same kind of GPU, with and without a draft model.

Selects the results by their names, so that a new measurement replaces an old one without a change here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.benchmarks.samples import ratio
from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import Row, device, family, median_of, number, table
from outrider.benchmarks.tables.peers import measurements
from outrider.benchmarks.tables.serving import tokens_per_gpu, tokens_per_user

_USERS_OF_TABLE = (1, 8, 32, 128)
_OWN_ENGINE = "Outrider"
_OUTRIDER = "h100-beside-vllm-8b-1b"
"""Family of Outrider's results."""
_VLLM = ("h100-vllm-8b-1b-plain", "h100-vllm-8b-1b-k3")
"""Results of vLLM: without speculation, and with the same draft model."""


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
    """By number of users."""


def compared_systems(results: Sequence[Result]) -> list[System]:
    """Systems of the comparison that were measured: Outrider's first, each without and with a draft model."""
    own = [result for result in results if result.kind == "serve" and family(result) == _OUTRIDER]
    peers = sorted((result for result in results if result.name in _VLLM), key=lambda result: _VLLM.index(result.name))
    systems = [_own_system(own, "baseline"), _own_system(own, "speculation"), *map(_peer_system, peers)]
    return [system for system in systems if system.points]


def _own_system(results: Sequence[Result], arm: str) -> System:
    points = {}
    for result in results:
        milliseconds = median_of(result, "after_first_tokens", arm=arm)
        per_gpu, per_user = tokens_per_gpu(result, arm), tokens_per_user(result, arm)
        if milliseconds and per_gpu and per_user:
            points[int(result.configuration["traffic"]["max_concurrency"])] = Point(per_gpu, per_user, milliseconds)
    return System(_named(_OWN_ENGINE, is_plain=arm == "baseline"), arm == "baseline", dict(sorted(points.items())))


def _peer_system(result: Result) -> System:
    found = list(measurements(result))
    points = {
        one.num_users: Point(one.tokens_per_gpu, one.tokens_per_user, one.after_first_ms)
        for one in found
        if one.tokens_per_gpu and one.tokens_per_user and one.after_first_ms
    }
    version = found[0].system.replace("vllm", "vLLM") if found else "vLLM"
    is_plain = result.name == _VLLM[0]
    return System(_named(version, is_plain=is_plain), is_plain, dict(sorted(points.items())))


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
    chosen = [result for result in results if family(result) == _OUTRIDER or result.name in _VLLM]
    days = sorted({result.created_at[:10] for result in chosen})
    cards = sorted({device(result) for result in chosen})
    commits = sorted({result.environment.commit[:9] for result in chosen if result.kind == "serve"})
    lengths = " vLLM drafts 3 tokens per step;" if any(result.name == _VLLM[1] for result in results) else ""
    where = "one after the other on one machine" if len(days) == 1 else "on different machines of one kind"
    return (
        f"{' and '.join(cards)}: one GPU for both models, 8B and 1B shapes in bfloat16 with synthetic weights "
        "(about 0.8 of the judged draft tokens are accepted), greedy, 128 tokens in and 256 out, "
        "less the time of the first tokens. "
        f"Medians. Measured on {' and '.join(days)}, {where}, Outrider at commit "
        f"{', '.join(commits)}.{lengths} Outrider chooses 0 to 8 draft tokens per step."
    )
