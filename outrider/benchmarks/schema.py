"""The result of any benchmark, and its file.

Owns one schema: what was run (name, configuration), where (commit, device, versions), what was measured (raw samples)
and what follows from it (statistics, figures). A file's statistics are for its readers; loading computes them again
and refuses a file in which they differ, so that no table can say what the samples do not.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.benchmarks.samples import Statistics, statistics_of
from outrider.errors import ConfigError

SCHEMA_VERSION = 1
RESULTS = Path("benchmarks/results")
"""Under the folder that the command runs in: a checkout."""

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
    """Raw samples of one quantity under one set of labels."""

    name: str
    unit: str
    samples: tuple[float, ...]
    labels: dict[str, Label] = field(default_factory=dict)

    @property
    def statistics(self) -> Statistics | None:
        """Computed from the samples; None when there are none."""
        return statistics_of(self.samples)


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
    path.write_text(json.dumps(to_json(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


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
    if computed is not None:
        _check_same(series.name, dataclasses.asdict(computed), stored)
    return series


def _check_same(name: str, computed: Mapping[str, float], stored: Mapping[str, float]) -> None:
    for key, value in computed.items():
        if not math.isclose(value, stored[key], rel_tol=1e-9, abs_tol=1e-12):
            raise ConfigError(name, f"says {key} {stored[key]}, but its samples give {value}")
