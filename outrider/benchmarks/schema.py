"""The result of any benchmark, and its file.

Owns one schema: what was run (name, configuration), where (commit, device, versions), what was measured (samples) and
what follows from it (statistics, figures). Loading computes the statistics again and refuses a file whose samples give
others. A published result is a summary (`summarized`): of each series that a table reads, one line of statistics.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.benchmarks.samples import Statistics, statistics_of
from outrider.errors import ConfigError

SCHEMA_VERSION = 1
RESULTS = Path("benchmarks/results")
"""Folder of results under the working directory, which is a checkout."""

_STAGES = ("draft", "target", "accept", "wire", "total")
_TIMES = frozenset(("ttft", "tpot", "until_all_finished", "after_first_tokens"))
_PUBLISHED_SERIES: dict[str, frozenset[str] | None] = {
    "serve": _TIMES | {"output_throughput", "speedup", *(f"decode_{stage}" for stage in _STAGES)},
    "interference": frozenset(("itl",)),
    "engine": None,
    "kernels": None,
    "peers": _TIMES,
}
"""Series that a published result keeps, by kind; None: all. Results of other kinds are published whole, since their
tables compare samples by their order.
"""
_FIXED_LENGTH = "K="
"""Beginning of the names of arms with a fixed draft length, of which a published result keeps the throughput alone."""
_PUBLISHED_FIGURES = frozenset(("completed", "spec_decode_acceptance_rate", "outrider_acceptance"))
"""Figures of an arm that a published result keeps."""
_PUBLISHED_VERSIONS = frozenset(("python", "outrider", "torch", "triton", "grpcio"))
_SUMMARY = ("count", "mean", "median", "p99")
"""Statistics in the line of a published series, after its name, unit and labels."""

Label = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of a benchmark."""

    commit: str
    """Empty outside a checkout."""
    has_local_changes: bool
    device: str
    """Device of the models, in words; "cpu" alone is not enough: see `cpu`."""
    cpu: str
    num_cpus: int
    """CPUs that this process may use."""
    platform: str
    versions: dict[str, str]
    """Versions of Python, Outrider and its libraries."""


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one quantity under one set of labels."""

    name: str
    unit: str
    samples: tuple[float, ...]
    """All of them in their order; empty with ``summary``."""
    labels: dict[str, Label] = field(default_factory=dict)
    summary: Statistics | None = None
    """Statistics of all samples, which a published result has instead of the samples."""

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
    """"serve", "interference", "engine", "kernels", "rpc", "step", "tracing" or "peers"."""
    name: str
    created_at: str
    """UTC, ISO 8601."""
    environment: Environment
    configuration: dict[str, Any]
    series: tuple[Series, ...]
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures that are no statistic of one series; for "serve", by arm, the keys of `vllm bench serve`."""

    def find(self, name: str, **labels: Label) -> Series | None:
        """The first series of that name whose labels include these."""
        return next((item for item in self.series if item.name == name and labels.items() <= item.labels.items()), None)


def summarized(result: Result) -> Result:
    """The result as it is published: statistics of the series and the figures that tables read."""
    if result.kind not in _PUBLISHED_SERIES:
        return result
    kept = _PUBLISHED_SERIES[result.kind]
    series = tuple(_summary_of(series) for series in result.series if kept is None or _is_published(series, kept))
    versions = {name: version for name, version in result.environment.versions.items() if name in _PUBLISHED_VERSIONS}
    return dataclasses.replace(
        result,
        environment=dataclasses.replace(result.environment, versions=versions),
        series=series,
        figures={
            name: _published_figure(value)
            for name, value in result.figures.items()
            if not name.startswith(_FIXED_LENGTH)
        },
    )


def _is_published(series: Series, kept: frozenset[str]) -> bool:
    if str(series.labels.get("arm", "")).startswith(_FIXED_LENGTH):
        return series.name == "output_throughput"
    return series.name in kept


def _summary_of(series: Series) -> Series:
    found = series.statistics
    if found is None:
        return series
    rounded = {name: _rounded(getattr(found, name)) for name in _SUMMARY if name != "count"}
    return dataclasses.replace(series, samples=(), summary=_statistics_from(found.count, **rounded))


def _statistics_from(count: int, mean: float, median: float, p99: float) -> Statistics:
    """Statistics of a published series: those that it does not keep are not numbers."""
    unknown = dict.fromkeys(("std", "p90", "minimum", "maximum"), math.nan)
    return Statistics(count=count, mean=mean, median=median, p99=p99, **unknown)


def _published_figure(figure: Any) -> Any:  # noqa: ANN401 - any JSON value
    if not isinstance(figure, Mapping):
        return figure
    return {
        key: _rounded(value) if isinstance(value, float) else value
        for key, value in figure.items()
        if key in _PUBLISHED_FIGURES
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


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


def _series_to_json(series: Series) -> dict[str, Any] | list[Any]:
    if series.summary is not None:
        return [series.name, series.unit, series.labels, *(getattr(series.summary, name) for name in _SUMMARY)]
    found = series.statistics
    return {
        "name": series.name,
        "unit": series.unit,
        "labels": series.labels,
        "statistics": None if found is None else dataclasses.asdict(found),
        "samples": list(series.samples),
    }


def _series_from_json(content: Mapping[str, Any] | Sequence[Any]) -> Series:
    if not isinstance(content, Mapping):
        name, unit, labels, *summary = content
        return Series(name, unit, (), dict(labels), _statistics_from(*summary))
    series = Series(content["name"], content["unit"], tuple(content["samples"]), dict(content["labels"]))
    computed, stored = series.statistics, content["statistics"]
    if (computed is None) != (stored is None):
        raise ConfigError(series.name, "has statistics without samples, or samples without statistics")
    if computed is not None:
        _check_same(series.name, dataclasses.asdict(computed), stored)
    return series


def _check_same(name: str, computed: Mapping[str, float], stored: Mapping[str, float]) -> None:
    for key, value in computed.items():
        if not math.isclose(value, stored[key], rel_tol=1e-9, abs_tol=1e-12):
            raise ConfigError(name, f"says {key} {stored[key]}, but its samples give {value}")
