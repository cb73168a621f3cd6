"""Tables from committed results: `python -m outrider.benchmarks.report`, and with `--check` whether they are fresh.

Owns `benchmarks/results/README.md`, which it writes whole, and in the project's README the lines between the two marks:
one table, the comparison with vLLM. `--add FOLDER` takes new results in first, so that tables, plot and dates follow
from one command.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from outrider.benchmarks.schema import RESULTS, Result, load, save, summarized
from outrider.benchmarks.tables import TABLES, render, runs_table
from outrider.benchmarks.tables.comparison import comparison_table
from outrider.benchmarks.tables.plot import plot
from outrider.benchmarks.tables.short import short_lines
from outrider.benchmarks.tables.users import user_tables
from outrider.errors import ConfigError

BEGIN, END = "<!-- benchmarks: begin (python -m outrider.benchmarks.report) -->", "<!-- benchmarks: end -->"
_HEAD = "# Results\n\nMade by `python -m outrider.benchmarks.report` from the files beside this one; do not edit.\n\n"
_PLOT = "throughput.svg"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or with `--check` say which files are stale; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m outrider.benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a file is stale")
    parser.add_argument("--short", action="store_true", help="change nothing; print a line for each figure")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout")
    parser.add_argument(
        "--add",
        type=Path,
        action="append",
        default=[],
        metavar="PLACE",
        help="first take in a result file, or those of a folder; each replaces the one of its name; may be repeated",
    )
    options = parser.parse_args(argv)
    try:
        if options.short:
            return _print_short(options.root)
        if options.check:
            return _check(options.root)
        _take_in(options.add, options.root)
        return _write(options.root)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _print_short(root: Path) -> int:
    for line in short_lines(_results(root)):
        print(line)
    return 0


def _results(root: Path) -> list[Result]:
    return [_tabled(load(path)) for path in sorted((root / RESULTS).glob("*.json"), key=_in_order)]


def _in_order(path: Path) -> list[str | int]:
    """Numbers in names by their size."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.stem)]


def _take_in(places: Sequence[Path], root: Path) -> None:
    """Copy summaries of results into the checkout; nothing is copied unless all of them can be shown."""
    results = [_tabled(load(path)) for place in places for path in _files_of(place)]
    for result in results:
        save(summarized(result), root / RESULTS)


def _files_of(place: Path) -> list[Path]:
    """The file itself, or those of a folder, which may be what ``outrider bench figures`` has filled."""
    if place.is_file():
        return [place]
    found = sorted((place / RESULTS).glob("*.json")) or sorted(place.glob("*.json"))
    if not found:
        raise ConfigError("--add", f"{place} has no results (*.json), nor has {place / RESULTS}")
    return found


def _write(root: Path) -> int:
    for path, content in _contents(root):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return 0


def _check(root: Path) -> int:
    stale = [
        path for path, content in _contents(root) if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    for path in stale:
        print(f"{path} is stale: run python -m outrider.benchmarks.report", file=sys.stderr)
    return 1 if stale else 0


def _contents(root: Path) -> Iterable[tuple[Path, str]]:
    """(file, what it should hold)."""
    results = _results(root)
    drawing = plot(results)
    if drawing:
        yield root / RESULTS / _PLOT, drawing
    serving = [result for result in results if result.kind == "serve"]
    parts = [_link(drawing), _when(results), user_tables(serving), render(results), runs_table(results)]
    yield root / RESULTS / "README.md", _HEAD + "\n".join(filter(None, parts))
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if BEGIN in text:
        yield readme, _between_marks(text, comparison_table(results))


def _link(drawing: str) -> str:
    """The plot in Markdown, with what it shows; empty without one."""
    if not drawing:
        return ""
    words = "Tokens per second of one user against tokens per second of one GPU; the labels are numbers of users"
    return f"![{words}]({_PLOT})\n\n{words}. Dashed: the target alone.\n"


def _when(results: Sequence[Result]) -> str:
    """Dates of the results, and the names of those of uncommitted code; empty without any."""
    if not results:
        return ""
    days = sorted(result.created_at[:10] for result in results)
    span = f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"
    changed = ", ".join(f"`{result.name}`" for result in results if result.environment.has_local_changes)
    but = f" ({changed}: with changes that were not committed)" if changed else ""
    return f"Measured {span}; each file names its commit{but}.\n"


def _tabled(result: Result) -> Result:
    if result.kind not in TABLES:
        raise ConfigError(f"{result.name}.json", f"is of kind {result.kind!r}, which no table shows")
    return result


def _between_marks(text: str, tables: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ConfigError("README.md", f"has {BEGIN!r} without {END!r}")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
