"""Tables of what users see: serving, long prompts beside running requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.benchmarks.samples import ratio
from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import (
    Row,
    best_fixed,
    device,
    mean_of,
    median_of,
    notes,
    number,
    pair,
    table,
)

_OTHER_SAMPLING = re.compile(r"T=(\S+) p=(\S+) k=(\d+)")
"""Name of an arm with its own sampling."""


def _serve_table(results: Sequence[Result]) -> str:
    """Times of a token beside the tables of ``users``, which have the rates."""
    heads = ["run", "T", "K", "TPOT ms", "until all finished, ms", "best fixed K: tok/s per GPU"]
    explained = [
        "Figures of the form a / b: with speculation / without. K: draft tokens per step; with ≤ the controller "
        "chooses up to so many. TPOT: mean over streams of (last - first) / (tokens - 1), from which tok/s per user "
        "follows. Until all finished: the time of the whole load by the tokens of one user, prefill included; in "
        "brackets without the time of the same requests with one token each, by the tokens after the first.",
    ]
    return table("Milliseconds per token", heads, [_serve_row(result) for result in results], explained)


def _serve_row(result: Result) -> Row:
    configuration = result.configuration
    return [
        f"`{result.name}`",
        sampling(configuration["decoding"]),
        f"{'' if configuration.get('draft_length') != 'auto' else '≤ '}{configuration['num_speculative_tokens']}",
        pair_of(result, lambda one, arm: mean_of(one, "tpot", {"arm": arm}), 2),
        _until_all_finished(result),
        _best_fixed_of(result),
    ]


def _until_all_finished(result: Result) -> str:
    whole = pair_of(result, lambda one, arm: median_of(one, "until_all_finished", arm=arm), 2)
    decoding = pair_of(result, lambda one, arm: median_of(one, "after_first_tokens", arm=arm), 2)
    return f"{whole} ({decoding})" if decoding else whole


def num_gpus(result: Result) -> int:
    """GPUs of both models, 0 on a CPU; older results do not name the number."""
    return int(result.configuration.get("num_gpus", 0 if result.environment.device == "cpu" else 1))


def _best_fixed_of(result: Result) -> str:
    found = best_fixed(result)
    return "" if found is None else f"{number(found[1] / (num_gpus(result) or 1), 1)} ({found[0]})"


def tokens_per_user(result: Result, arm: str) -> float | None:
    """Tokens a second of one user, from the mean time of a token over streams."""
    return ratio(1e3, mean_of(result, "tpot", {"arm": arm}))


def tokens_per_gpu(result: Result, arm: str) -> float | None:
    """Tokens a second of all users, by the number of GPUs; None on a CPU."""
    return ratio(median_of(result, "output_throughput", arm=arm), num_gpus(result))


def sampling(decoding: Mapping[str, Any]) -> str:
    """Temperature, and top-p and top-k where they leave tokens out."""
    parts = [f"{decoding['temperature']:g}"]
    if decoding["top_p"] < 1:
        parts.append(f"top-p {decoding['top_p']:g}")
    if decoding["top_k"]:
        parts.append(f"top-k {decoding['top_k']}")
    return ", ".join(parts)


def other_samplings(result: Result) -> dict[str, str]:
    """Arms with another sampling than the result's own, and it in words."""
    arms = {arm: _OTHER_SAMPLING.fullmatch(arm) for arm in result.figures}
    return {
        arm: sampling({"temperature": float(found[1]), "top_p": float(found[2]), "top_k": int(found[3])})
        for arm, found in arms.items()
        if found
    }


def pair_of(result: Result, figure: Callable[[Result, str], float | None], digits: int) -> str:
    """Cell of a figure with speculation, and without if that was measured."""
    both = [number(figure(result, arm), digits) for arm in ("speculation", "baseline")]
    return " / ".join(filter(None, both))


def _steps_table(results: Sequence[Result]) -> str:
    """Decode steps by stage; results without such times are left out."""
    rows = [
        [f"`{r.name}`", arm, *(number(median_of(r, f"decode_{stage}", arm=arm), 2) for stage in _STAGES)]
        for r in results
        for arm in ("speculation", *other_samplings(r), "baseline")
        if median_of(r, "decode_total", arm=arm) is not None
    ]
    return table("Time of a decode step by stage, ms", ["run", "arm", *_STAGES], rows, []) if rows else ""


_STAGES = ("draft", "target", "accept", "wire", "total")


def serve_tables(results: Sequence[Result]) -> str:
    """Tables of what users see, and of the time of a step."""
    return "\n".join(filter(None, [_serve_table(results), _steps_table(results)])) if results else ""


def interference_table(results: Sequence[Result]) -> str:
    """Gaps of running requests, alone and beside a prefill."""
    heads = ["run", "device", "pair", "K", "running", "prefill tokens", "p99 without, ms", "p99 with, ms", "ratio"]
    rows = []
    for result in results:
        facts, gaps = result.configuration, [result.find("itl", arm=arm) for arm in ("alone", "beside a prefill")]
        p99s = [None if found is None or found.statistics is None else found.statistics.p99 for found in gaps]
        named = [facts["num_speculative_tokens"], facts["num_running"], facts["prefill_tokens"]]
        rows.append(
            [
                f"`{result.name}`",
                device(result),
                pair(facts),
                *("default" if value is None else str(value) for value in named),
                *(number(value, 1) for value in p99s),
                number(ratio(p99s[1], p99s[0]), 2),
            ]
        )
    title = "Gaps between messages of running requests while a long prompt is prefilled"
    return table(title, heads, rows, notes(results)) if rows else ""
