"""Measurement of parts one after the other, with their table at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence

from outrider.benchmarks.figures.measuring import measure_part
from outrider.benchmarks.figures.parts import PARTS, find_parts
from outrider.benchmarks.figures.rows import Part
from outrider.benchmarks.figures.session import MeasuringSession, environment_of
from outrider.benchmarks.figures.table import table

__all__ = ["MeasuringSession", "find_parts", "measure", "part_names", "print_parts"]


def part_names() -> list[str]:
    """Names of all parts."""
    return [part.name for part in PARTS]


def print_parts() -> None:
    """Print the name, GPUs, time limit and subject of every part."""
    print("\n".join(f"{part.name:<14} GPUs: {part.num_cards}, {part.limit_s} s: {part.about}" for part in PARTS))


def measure(
    session: MeasuringSession,
    parts: Sequence[Part],
    *,
    commit: str | None,
    limit_s: float | None,
    is_table_only: bool = False,
) -> None:
    """Measure the parts, each within ``limit_s`` or its own limit, and print the table of what the folder has."""
    (session.out / "logs").mkdir(parents=True, exist_ok=True)
    for part in () if is_table_only else parts:
        print(f"== {part.name}: {part.about}", flush=True)
        session.environment = environment_of(os.environ, part.num_cards, commit)
        measure_part(session, part, limit_s or part.limit_s)
    print(table(session, list(parts)))
