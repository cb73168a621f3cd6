"""Markdown from results: a table for each kind of benchmark.

Every figure is computed from the samples of a result; nothing is typed in by hand. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import commit, table
from outrider.benchmarks.tables.parts import (
    engine_table,
    kernels_table,
    rpc_table,
    step_table,
    tracing_table,
)
from outrider.benchmarks.tables.peers import peers_table
from outrider.benchmarks.tables.serving import interference_table, serve_tables

_NOTHING = "No results are committed yet.\n"

TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "serve": serve_tables,
    "engine": engine_table,
    "kernels": kernels_table,
    "rpc": rpc_table,
    "step": step_table,
    "tracing": tracing_table,
    "peers": peers_table,
    "interference": interference_table,
}
"""Tables by kind of result; a table of no results is empty."""


def render(results: Sequence[Result], kinds: Iterable[str] | None = None) -> str:
    """The tables as Markdown: of these kinds of result, or of all."""
    wanted = list(TABLES) if kinds is None else list(kinds)
    parts = [table for kind in wanted if (table := TABLES[kind]([r for r in results if r.kind == kind]))]
    return "\n".join(parts) if parts else _NOTHING


def runs_table(results: Sequence[Result]) -> str:
    """Table of the code version of each result; empty without results."""
    heads = ["run", "when", "commit", "PyTorch", "gRPC", "Python"]
    rows = [
        [
            f"`{result.name}`",
            result.created_at[:10],
            commit(result.environment),
            *(result.environment.versions.get(package, "") for package in ("torch", "grpcio", "python")),
        ]
        for result in results
    ]
    note = "With changes: files that were not committed lay in the checkout, or what ran was a copy."
    return table("What was run", heads, rows, [note], of="") if rows else ""
