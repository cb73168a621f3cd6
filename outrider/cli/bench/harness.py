"""The way from a command to the package ``benchmarks``, and what all its commands show."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from outrider.cli.options import output, progress
from outrider.demo import DRAFT, TARGET
from outrider.errors import ConfigError, install_command


def require_benchmarks() -> None:
    """Raise a ``ConfigError`` where Outrider was installed from a wheel, which has no benchmarks."""
    if importlib.util.find_spec("outrider.benchmarks") is None:
        raise ConfigError(
            "", "benchmarks are not in the wheel: run pip install -e . in a clone of Outrider, and outrider bench there"
        )


def benchmark(name: str) -> Any:  # noqa: ANN401 - a module
    """A module of the benchmarks; ``ConfigError`` where they, or what they need, are not installed."""
    try:
        return importlib.import_module(f"outrider.benchmarks.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "outrider":
            raise
        raise ConfigError("", f"this benchmark needs {missing}: {install_command('engine')}") from error


def save(result: Any) -> None:  # noqa: ANN401 - a benchmark's result
    """Write the result's file and say where it is."""
    progress.print(f"saved {benchmark('schema').save(result)}", markup=False)


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; gives what advances it by one."""
    with Progress(console=progress, transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda: shown.advance(task)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Figures under heads; the first column is text. Words and figures are whole on narrow screens and in files too."""
    shown = Table(box=None, pad_edge=False)
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    for index, column in enumerate(zip(heads, *cells, strict=True)):
        longest = max(len(word) for cell in column for word in cell.split() or [""])
        shown.add_column(column[0], justify="left" if index == 0 else "right", min_width=longest)
    for row in cells:
        shown.add_row(*row)
    return shown


def print_weights_notes(facts: Mapping[str, Any]) -> None:
    """Say of a result's configuration that its weights are not a real model's, where that is so."""
    for _, words in benchmark("tables.cells").marks([facts]):
        output.print(words, markup=False)


def is_synthetic(folder: Path | None) -> bool:
    """True if a model's folder is one of a pair that ``tools/make_pair.py`` wrote."""
    return folder is not None and (folder.parent / "synthetic_pair.json").is_file()


def model_name(folder: Path) -> str:
    """A model's name in tables."""
    if folder in {TARGET, DRAFT}:
        return f"embedded {folder.name}"
    return f"{folder.parent.name} {folder.name}" if is_synthetic(folder) else folder.name


def pair_name(target: Path, draft: Path | None) -> str:
    """A pair's name in tables."""
    if target == TARGET and draft == DRAFT:
        return "embedded"
    if is_synthetic(target) and draft is not None and draft.parent == target.parent:
        return target.parent.name
    return f"{model_name(target)} / {model_name(draft) if draft else 'none'}"
