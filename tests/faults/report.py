"""Figures of scenarios against their bounds: one table for people, one JSON file for everything else."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one scenario. Without a bound it is only reported."""

    name: str
    value: float
    bound: float | None = None
    unit: str = ""

    @property
    def passes(self) -> bool:
        """True if it keeps its bound; below zero is a failure to say how much."""
        return self.bound is None or 0 <= self.value <= self.bound


@dataclass(slots=True)
class Result:
    """Result of one scenario."""

    scenario: str
    seed: int
    scale: float
    """Scale of the counts; 0 is the short form."""
    figures: list[Figure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Wrong streams, crashes, what was left over: each is one too many."""
    samples: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passes(self) -> bool:
        """True if every figure keeps its bound."""
        return all(figure.passes for figure in self.figures)

    def add(self, name: str, value: float, bound: float | None = None, unit: str = "") -> None:
        """Note a figure."""
        self.figures.append(Figure(name, value, bound, unit))

    def as_json(self) -> dict[str, Any]:
        """Entry of the result file; of many problems the first ones."""
        return {
            "seed": self.seed,
            "scale": self.scale,
            "seconds": round(self.seconds, 1),
            "passes": self.passes,
            "figures": [
                {"name": f.name, "value": round(f.value, 4), "bound": f.bound, "unit": f.unit, "passes": f.passes}
                for f in self.figures
            ],
            "num_problems": len(self.problems),
            "problems": self.problems[:_MOST_PROBLEMS],
            "samples": self.samples,
        }


def write(path: Path, result: Result) -> dict[str, Any]:
    """Put the scenario's result into the file, beside those of other scenarios; all that the file then holds."""
    held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"scenarios": {}}
    held["scenarios"][result.scenario] = {**_where(), **result.as_json()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(held, indent=1) + "\n")
    return held


def table(held: dict[str, Any]) -> str:
    """All figures of a result file, one a line."""
    rows = [("scenario", "figure", "value", "bound", "")]
    for name, scenario in held["scenarios"].items():
        for number, figure in enumerate(scenario["figures"]):
            bound = "" if figure["bound"] is None else f"{figure['bound']:g}"
            verdict = "" if figure["bound"] is None else ("pass" if figure["passes"] else "FAIL")
            value = f"{figure['value']:g} {figure['unit']}".strip()
            rows.append((name if number == 0 else "", figure["name"], value, bound, verdict))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _where() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[1],
        "python": platform.python_version(),
    }


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return asked.stdout.strip()
