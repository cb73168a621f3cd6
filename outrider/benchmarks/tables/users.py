"""Serving results as a user reads them: a table for each arrangement of the models, a row for each number of users."""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import Row, acceptance_rate, device, family, median_of, notes, number, pair, table
from outrider.benchmarks.tables.serving import (
    num_gpus,
    other_samplings,
    pair_of,
    sampling,
    tokens_per_gpu,
    tokens_per_user,
)

_HEADS = ["users", "T", "tokens in", "tok/s per user", "tok/s per GPU", "speedup", "acceptance rate", "TTFT ms"]
_EXPLAINED = (
    "Medians; a / b is with speculation / without. tok/s per user: while its tokens come. tok/s per GPU: of all users, "
    "prefill included, by the number of GPUs. Speedup: the median over pairs of runs, one with and one without, of the "
    "quotient of their tok/s. Acceptance rate: accepted / drafted tokens; empty where nothing was drafted."
)


def user_tables(results: Sequence[Result]) -> str:
    """A table for each device, arrangement and pair; empty without results. Heads and draft models of one target have
    one title, and are told apart by the names of their results. Single results of one title share a table.
    """
    families: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        families.setdefault((_title(result), family(result)), []).append(result)
    groups: dict[tuple[str, str | None], list[Result]] = {}
    for (title, name), own in families.items():
        groups.setdefault((title, name if len(own) > 1 else None), []).extend(own)
    tables = [
        _named_table(title, group) if name is None and len(group) > 1 else _table(title, group)
        for (title, name), group in groups.items()
    ]
    explained = [_EXPLAINED, *notes(results)]
    return "\n".join([*tables, "\n\n".join(explained), ""]) if results else ""


def _table(title: str, results: Sequence[Result]) -> str:
    """Table of one family of results."""
    names = [result.name for result in results]
    of = names[0] if len(names) == 1 else f"{os.path.commonprefix(names)}*"  # noqa: RUF071 - names, not paths
    return table(title, _HEADS, [row for result in results for row in _rows(result)], [], of=f" (`{of}`)")


def _named_table(title: str, results: Sequence[Result]) -> str:
    """Table of several families with a result each, whose names say what they are of."""
    rows = [[f"`{result.name}`", *row] for result in results for row in _rows(result)]
    return table(title, ["result", *_HEADS], rows, [], of="")


def _title(result: Result) -> str:
    facts, gpus = result.configuration, num_gpus(result)
    where = f"{gpus} x {device(result)}" if gpus else device(result)
    drafts = "up to " if facts.get("draft_length") == "auto" else ""
    parts = [where, facts.get("placement"), pair(facts), f"{drafts}{facts['num_speculative_tokens']} draft tokens"]
    return ", ".join(filter(None, parts))


def _rows(result: Result) -> list[Row]:
    """One, and one for each other sampling that took turns with it, which has no runs without speculation."""
    facts = result.configuration
    users, num_in = facts["traffic"]["max_concurrency"], ", ".join(map(str, facts["input_lens"]))

    def row(words: str, figures: Row) -> Row:
        return ["all" if users is None else str(users), words, num_in, *figures]

    others = [row(words, _figures_of_arm(result, arm)) for arm, words in other_samplings(result).items()]
    return [row(sampling(facts["decoding"]), _figures(result)), *others]


def _figures_of_arm(result: Result, arm: str) -> Row:
    return [
        number(tokens_per_user(result, arm), 0),
        number(tokens_per_gpu(result, arm), 0),
        "",
        number(acceptance_rate(result.figures[arm]), 2),
        number(median_of(result, "ttft", arm=arm), 0),
    ]


def _figures(result: Result) -> Row:
    return [
        pair_of(result, tokens_per_user, 0),
        pair_of(result, tokens_per_gpu, 0),
        number(median_of(result, "speedup"), 2),
        number(acceptance_rate(result.figures["speculation"]), 2),
        pair_of(result, lambda one, arm: median_of(one, "ttft", arm=arm), 0),
    ]
