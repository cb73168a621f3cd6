"""The result of any benchmark, and its file.

Owns one schema: what was run (name, configuration), where (commit, device, versions), what was measured (samples) and
what follows from it (statistics, figures). Loading computes the statistics again and refuses a file whose samples give
others. A published result is a summary (`summarized`): statistics of all samples and a few quantiles, which
loading holds against each other.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.benchmarks.samples import Statistics, statistics_of, thinned
from outrider.errors import ConfigError

SCHEMA_VERSION = 1
RESULTS = Path("benchmarks/results")
"""Under the folder that the command runs in: a checkout."""

NUM_QUANTILES = 5
"""Samples that a summary keeps of a series, from the smallest to the largest."""
_SUMMARIZED = ("serve", "interference", "engine", "kernels")
"""Kinds of result whose series are independent of each other; the others compare samples by their order."""
_DERIVED = ("mean_", "median_", "std_", "p90_", "p99_")
"""Prefixes of figures that repeat the statistics of a series."""

Label = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of a benchmark."""

    commit: str
    """Empty outside a checkout."""
    has_local_changes: bool
    device: str
    """Of the models, in words; "cpu" alone is not enough: see `cpu`."""
    cpu: str
    num_cpus: int
    """Those that this process may use."""
    platform: str
    versions: dict[str, str]
    """Of Python, Outrider and what it computes and speaks with."""


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one quantity under one set of labels."""

    name: str
    unit: str
    samples: tuple[float, ...]
    """All of them in their order, or with ``summary`` quantiles."""
    labels: dict[str, Label] = field(default_factory=dict)
    summary: Statistics | None = None
    """Statistics of all samples, of which ``samples`` are quantiles."""

    @property
    def statistics(self) -> Statistics | None:
        """Statistics of all samples; None when there are none."""
        return self.summary or statistics_of(self.samples)

    @property
    def median(self) -> float | None:
        """Median of all samples; None when there are none."""
        found = self.statistics
        return None if found is None else found.median


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one benchmark."""

    kind: str
    """"serve", "interference", "engine", "kernels", "rpc", "step", "tracing", "planes" or "peers"."""
    name: str
    created_at: str
    """UTC, ISO 8601."""
    environment: Environment
    configuration: dict[str, Any]
    series: tuple[Series, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    """What is not a statistic of one series; for "serve", by arm, the keys of `vllm bench serve`."""

    def find(self, name: str, **labels: Label) -> Series | None:
        """The first series of that name whose labels include these."""
        return next((item for item in self.series if item.name == name and labels.items() <= item.labels.items()), None)


def summarized(result: Result) -> Result:
    """The result as it is published: long series as statistics and quantiles, without figures that repeat them."""
    if result.kind not in _SUMMARIZED:
        return result
    figures = {name: _without_derived(value) for name, value in result.figures.items()}
    return dataclasses.replace(result, series=tuple(map(_summary_of, result.series)), figures=figures)


def _summary_of(series: Series) -> Series:
    if series.summary is not None or len(series.samples) <= NUM_QUANTILES:
        return series
    quantiles = tuple(_rounded(value) for value in thinned(series.samples, NUM_QUANTILES))
    statistics = series.statistics
    if statistics is None:
        return series
    values = dataclasses.asdict(statistics)
    rounded: dict[str, Any] = {name: _rounded(value) for name, value in values.items() if name != "count"}
    summary = dataclasses.replace(statistics, **rounded)
    return dataclasses.replace(series, samples=quantiles, summary=summary)


def _without_derived(figure: Any) -> Any:  # noqa: ANN401 - any JSON value
    if not isinstance(figure, Mapping):
        return figure
    return {key: value for key, value in figure.items() if not key.startswith(_DERIVED)}


def _rounded(value: float) -> float:
    return float(f"{value:.8g}")


def to_json(result: Result) -> dict[str, Any]:
    """Plain JSON values, statistics beside the samples."""
    content = dataclasses.asdict(result)
    content["series"] = [_series_to_json(series) for series in result.series]
    return {"schema_version": SCHEMA_VERSION, **content}


def from_json(content: Mapping[str, Any]) -> Result:
    """The result again; `ConfigError` when it is of another schema or its statistics are not those of its samples."""
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError("schema_version", f"must be {SCHEMA_VERSION}, not {content.get('schema_version')!r}")
    try:
        return Result(
            kind=content["kind"],
            name=content["name"],
            created_at=content["created_at"],
            environment=Environment(**content["environment"]),
            configuration=content["configuration"],
            series=tuple(_series_from_json(series) for series in content["series"]),
            figures=content["figures"],
        )
    except (KeyError, TypeError) as error:
        raise ConfigError("", f"is no benchmark result: {error}") from error


def save(result: Result, folder: Path = RESULTS) -> Path:
    """Write `folder/NAME.json`; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(_with_a_line_per_series(to_json(result)), encoding="utf-8")
    return path


def _with_a_line_per_series(content: Mapping[str, Any]) -> str:
    """JSON whose lines are the fields, and each series."""
    lines = [f"{json.dumps(key)}: {_compact(value)}" for key, value in content.items() if key != "series"]
    series = ",\n".join(map(_compact, content["series"]))
    return "{\n" + ",\n".join([*lines, f'"series": [\n{series}\n]']) + "\n}\n"


def _compact(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def load(path: Path) -> Result:
    """Read one file; `ConfigError` names it when it is not what `save` writes."""
    try:
        result = from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(str(path), str(error)) from error
    if result.name != path.stem:
        raise ConfigError(str(path), f"holds the result {result.name!r}")
    return result


def _series_to_json(series: Series) -> dict[str, Any]:
    found = series.statistics
    return {
        "name": series.name,
        "unit": series.unit,
        "labels": series.labels,
        "statistics": None if found is None else dataclasses.asdict(found),
        "samples": list(series.samples),
    }


def _series_from_json(content: Mapping[str, Any]) -> Series:
    series = Series(content["name"], content["unit"], tuple(content["samples"]), dict(content["labels"]))
    computed, stored = series.statistics, content["statistics"]
    if (computed is None) != (stored is None):
        raise ConfigError(series.name, "has statistics without samples, or samples without statistics")
    if computed is None:
        return series
    if stored["count"] > computed.count:
        summary = Statistics(**stored)
        _check_summary(series, summary)
        return dataclasses.replace(series, summary=summary)
    _check_same(series.name, dataclasses.asdict(computed), stored)
    return series


def _check_summary(series: Series, summary: Statistics) -> None:
    """Hold statistics of all samples against the quantiles that a summary keeps."""
    lowest, *_, highest = series.samples
    if len(series.samples) != NUM_QUANTILES or list(series.samples) != sorted(series.samples):
        raise ConfigError(
            series.name, f"says count {summary.count}, of which a summary keeps {NUM_QUANTILES} quantiles"
        )
    _check_same(series.name, {"minimum": lowest, "maximum": highest}, dataclasses.asdict(summary))
    below, above = series.samples[NUM_QUANTILES // 2 - 1], series.samples[NUM_QUANTILES // 2 + 1]
    for key, low, high in (
        ("median", below, above),
        ("p90", series.samples[-2], highest),
        ("p99", summary.p90, highest),
        ("mean", lowest, highest),
    ):
        if not low <= getattr(summary, key) <= high:
            raise ConfigError(series.name, f"says {key} {getattr(summary, key)}, which its quantiles exclude")


def _check_same(name: str, computed: Mapping[str, float], stored: Mapping[str, float]) -> None:
    for key, value in computed.items():
        if not math.isclose(value, stored[key], rel_tol=1e-9, abs_tol=1e-12):
            raise ConfigError(name, f"says {key} {stored[key]}, but its samples give {value}")
