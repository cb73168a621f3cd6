"""Parts that all tables share: rows, marks, devices, figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.benchmarks.schema import Environment, Label, Result

Row = Sequence[str]

_NUMBER_OF_USERS = re.compile(r"-?users\d+$")
_ROLES_ALONE = re.compile(r"target \(synthetic\) / draft(?: \(synthetic\))?")
"""Name of a pair that is served by the names of its folders."""
_MARKS = {
    "\\*": "A synthetic pair: random weights in the shape of a real model, with an acceptance rate that was chosen "
    "when the pair was made. The times are those of the system; the acceptance rate is not that of any model.",
    "†": "Random weights (`--load-format dummy`): text and acceptance rate have no meaning.",
}


def table(title: str, heads: Row, rows: Sequence[Row], notes: Sequence[str], *, of: str = " (medians)") -> str:
    """A table under its title, notes after it."""
    aligned = ["---" if index == 0 else "---:" for index in range(len(heads))]
    lines = [f"**{title}**{of}", "", *("| " + " | ".join(row) + " |" for row in (heads, aligned, *rows))]
    return "\n".join([*lines, *(f"\n{note}" for note in notes), ""])


def notes(results: Sequence[Result]) -> list[str]:
    """Explanations of the marks that are used."""
    return [f"{sign} {words}" for sign, words in marks([result.configuration for result in results])]


def marks(configurations: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(mark, what it means) of weights that are not a real model's."""
    used = {mark(configuration).strip() for configuration in configurations}
    return [(sign, words) for sign, words in _MARKS.items() if sign in used]


def pair(configuration: Mapping[str, Any]) -> str:
    """A pair's name, marked; of one whose names tell no more than the roles, that it is synthetic."""
    name = configuration["pair"]
    return f"{'synthetic pair' if _ROLES_ALONE.fullmatch(name) else name}{mark(configuration)}"


def mark(configuration: Mapping[str, Any]) -> str:
    """* of a synthetic pair, † of noise for weights."""
    if _is_noise(configuration):
        return " †"
    return " \\*" if configuration.get("synthetic") else ""


def _is_noise(configuration: Mapping[str, Any]) -> bool:
    return configuration.get("load_format") == "dummy"


def family(result: Result) -> str:
    """The name of a result less the number of users that it ends with: results that differ in nothing else share it.
    Empty where it ends otherwise.
    """
    name, found = _NUMBER_OF_USERS.subn("", result.name)
    return name if found else ""


def device(result: Result) -> str:
    """Device in words; of a CPU its name and cores."""
    environment = result.environment
    return f"{environment.cpu}, {environment.num_cpus} cores" if environment.device == "cpu" else environment.device


def arms_of(result: Result) -> list[str]:
    """Names of a serving result's arms, in order: speculation, baseline, K=4 and so on."""
    return list(dict.fromkeys(str(series.labels["arm"]) for series in result.series if "arm" in series.labels))


def best_fixed(result: Result) -> tuple[str, float] | None:
    """(arm, tokens/s) of the fastest fixed draft length; None where none was measured."""
    rates = [(arm, median_of(result, "output_throughput", arm=arm) or 0.0) for arm in arms_of(result)]
    return max((found for found in rates if found[0].startswith("K=")), key=lambda found: found[1], default=None)


def median_of(result: Result, name: str, **labels: Label) -> float | None:
    """Statistic of the first such series; None if there is none."""
    found = result.find(name, **labels)
    return None if found is None else found.median


def mean_of(result: Result, name: str, labels: Mapping[str, Label]) -> float | None:
    """Statistic of the first such series; None if there is none."""
    found = result.find(name, **labels)
    return None if found is None or found.statistics is None else found.statistics.mean


def number(value: float | None, digits: int) -> str:
    """Empty of None."""
    return "" if value is None else f"{value:.{digits}f}"


def commit(environment: Environment) -> str:
    """Short, and whether files differed from it."""
    if not environment.commit:
        return "not recorded"
    return environment.commit[:9] + (" with changes" if environment.has_local_changes else "")


def acceptance_rate(figures: Mapping[str, Any]) -> float | None:
    """Accepted by drafted tokens; the results have it in percent, as vLLM's benchmark does."""
    percent = figures.get("spec_decode_acceptance_rate")
    return None if percent is None else float(percent) / 100
