"""Tables from committed results: `python -m benchmarks.report`, and with `--check` whether they are fresh.

Owns `benchmarks/results/README.md`, which it writes whole, and in the project's README the lines between the two marks:
there only what a user feels, the rest stays beside the results.
Every figure is computed from the samples of a result file; nothing is typed in by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.samples import median, ratio
from benchmarks.schema import RESULTS, Result, Series, load
from benchmarks.tracing.run import MAKING, NOT_SAMPLED, OFF, PLACES, SAMPLED, added_us
from outrider.errors import ConfigError

BEGIN, END = "<!-- benchmarks: begin (python -m benchmarks.report) -->", "<!-- benchmarks: end -->"
_HEAD = "# Results\n\nMade by `python -m benchmarks.report` from the files beside this one; do not edit.\n\n"
_NOTHING = "No results are committed yet.\n"

Row = Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or with `--check` say which files are stale; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a file is stale")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout")
    options = parser.parse_args(argv)
    try:
        return _check(options.root) if options.check else _write(options.root)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def render(results: Sequence[Result], kinds: Iterable[str] | None = None) -> str:
    """The tables as Markdown: of these kinds of result, or of all."""
    wanted = list(_TABLES) if kinds is None else list(kinds)
    parts = [table for kind in wanted if (table := _TABLES[kind]([r for r in results if r.kind == kind]))]
    return "\n".join(parts) if parts else _NOTHING


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
        print(f"{path} is stale: run python -m benchmarks.report", file=sys.stderr)
    return 1 if stale else 0


def _contents(root: Path) -> Iterable[tuple[Path, str]]:
    """(file, what it should hold)."""
    results = [load(path) for path in sorted((root / RESULTS).glob("*.json"))]
    yield root / RESULTS / "README.md", _HEAD + render(results)
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if BEGIN in text:
        yield readme, _between_marks(text, render(results, _IN_README))


def _between_marks(text: str, tables: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ConfigError("README.md", f"has {BEGIN!r} without {END!r}")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def _serve_table(results: Sequence[Result]) -> str:
    heads = ["run", "device", "pair", "T", "K", "users", "tok/s", "K = 0", "times as fast", "acceptance",
             "accepted + 1", "TTFT ms", "TPOT ms", "K = 0"]  # fmt: skip
    return _table("Serving, three processes", heads, [_serve_row(result) for result in results], _notes(results))


def _serve_row(result: Result) -> Row:
    configuration, figures = result.configuration, result.figures["speculation"]
    users = configuration["traffic"]["max_concurrency"]
    return [
        f"`{result.name}`",
        _device(result),
        _pair(configuration),
        f"{configuration['decoding']['temperature']:g}",
        str(configuration["num_speculative_tokens"]),
        "all" if users is None else str(users),
        _number(_median(result, "output_throughput", arm="speculation"), 1),
        _number(_median(result, "output_throughput", arm="baseline"), 1),
        _number(_median(result, "speedup"), 2),
        _number(figures.get("outrider_acceptance"), 2),
        _number(figures.get("spec_decode_acceptance_length"), 2),
        _number(_median(result, "ttft", arm="speculation"), 1),
        _number(_median(result, "tpot", arm="speculation"), 2),
        _number(_median(result, "tpot", arm="baseline"), 2),
    ]


def _steps_table(results: Sequence[Result]) -> str:
    stages = ("draft", "target", "accept", "wire", "total")
    rows = [
        [f"`{r.name}`", *(_number(_median(r, f"step_{stage}", arm="speculation"), 2) for stage in stages)]
        for r in results
    ]
    return _table("Where a step's time goes, ms", ["run", *stages], rows, [])


def _serve_tables(results: Sequence[Result]) -> str:
    return "\n".join([_serve_table(results), _steps_table(results)]) if results else ""


def _rpc_table(results: Sequence[Result]) -> str:
    heads = ["run", "machine", "call", "over", "bytes there", "bytes back", "median ms", "p99 ms"]
    rows = [
        [
            f"`{result.name}`",
            _device(result),
            str(series.labels["call"]),
            str(series.labels["over"]),
            str(series.labels["num_bytes"]),
            str(series.labels["reply_bytes"]),
            _number(found.median, 3),
            _number(found.p99, 3),
        ]
        for result in results
        for series in result.series
        if (found := series.statistics) is not None
    ]
    return _table("The wire alone, a round trip between two processes", heads, rows, []) if rows else ""


def _engine_table(results: Sequence[Result]) -> str:
    heads = ["run", "device", "model", "what", "batch", "tokens", "context", "median ms", "floor ms", "times the floor"]
    rows = [row for result in results for row in _engine_rows(result)]
    return _table("The engine beside its floor", heads, rows, _notes(results)) if rows else ""


def _engine_rows(result: Result) -> Iterable[Row]:
    facts = result.configuration
    for series in result.series:
        milliseconds, labels = median(series.samples), series.labels
        if milliseconds is not None and "floor_ms" in labels:
            floor = float(labels["floor_ms"])
            yield [
                f"`{result.name}`",
                _device(result),
                f"{facts['model']} {facts['dtype']}{_sharing(facts)}{_mark(facts)}",
                series.name.replace("_", " "),
                *(str(labels[key]) for key in ("batch_size", "num_tokens", "context")),
                _number(milliseconds, 3),
                _number(floor, 3),
                _number(ratio(milliseconds, floor), 2),
            ]


def _sharing(facts: dict[str, Any]) -> str:
    size = facts.get("tensor_parallel_size", 1)
    return "" if size == 1 else f", shared by {size}"


def _kernels_table(results: Sequence[Result]) -> str:
    heads = ["run", "device", "kernel", "size", "median us", "floor us", "times the floor"]
    rows = [
        [
            f"`{result.name}`",
            _device(result),
            series.name,
            str(series.labels["size"]),
            _number(microseconds, 1),
            _number(floor, 1),
            _number(ratio(microseconds, floor), 2),
        ]
        for result in results
        for series in result.series
        if (microseconds := median(series.samples)) is not None and (floor := _floor_us(series)) is not None
    ]
    return _table("Kernels beside the time that their bytes take", heads, rows, []) if rows else ""


def _floor_us(series: Series) -> float | None:
    return float(series.labels["floor_us"]) if "floor_us" in series.labels else None


def _interference_table(results: Sequence[Result]) -> str:
    heads = ["run", "device", "pair", "K", "running", "prefill tokens", "p99 alone, ms", "p99 beside, ms", "times"]
    rows = []
    for result in results:
        facts, gaps = result.configuration, [result.find("itl", arm=arm) for arm in ("alone", "beside a prefill")]
        p99s = [None if found is None or found.statistics is None else found.statistics.p99 for found in gaps]
        named = [facts["num_speculative_tokens"], facts["num_running"], facts["prefill_tokens"]]
        rows.append(
            [
                f"`{result.name}`",
                _device(result),
                _pair(facts),
                *("default" if value is None else str(value) for value in named),
                *(_number(value, 1) for value in p99s),
                _number(ratio(p99s[1], p99s[0]), 2),
            ]
        )
    title = "What a long prompt does to running requests: gaps between messages"
    return _table(title, heads, rows, _notes(results)) if rows else ""


def _peers_table(results: Sequence[Result]) -> str:
    heads = ["run", "device", "pair", "engine", "K", "tokens in", "out", "TTFT ms", "TPOT ms", "prompts that differ"]
    rows = [row for result in results for row in _peer_rows(result)]
    return _table("Other engines, one request at a time", heads, rows, _notes(results)) if rows else ""


def _peer_rows(result: Result) -> Iterable[Row]:
    facts = result.configuration
    for engine, num_different in result.figures["prompts_that_differ"].items():
        speculates = engine.endswith(("assisted", "speculative"))
        yield [
            f"`{result.name}`",
            _device(result),
            _pair(facts),
            engine,
            str(facts["draft_length"]) if speculates else "0",
            ", ".join(map(str, facts["input_lens"])),
            str(facts["output_len"]),
            _number(_median(result, "ttft", engine=engine), 1),
            _number(_median(result, "tpot", engine=engine), 2),
            f"{num_different}/{facts['num_prompts']}",
        ]


def _tracing_table(results: Sequence[Result]) -> str:
    heads = ["run", "machine", "where", "off", "more when others are sampled", "more when it is itself"]
    rows = [
        [
            f"`{result.name}`",
            _device(result),
            place,
            _number(_median(result, place, arm=OFF), 1),
            *(_number(added_us(result.series, place, arm), 1) for arm in (NOT_SAMPLED, SAMPLED)),
        ]
        for result in results
        for place in PLACES
    ]
    makings = [f"{_number(_median(result, MAKING, arm=SAMPLED), 0)} us (`{result.name}`)" for result in results]
    note = f"In threads of their own all three make and encode a sampled step's spans: {', '.join(makings)}."
    return _table("What tracing adds to a step's loop, us", heads, rows, [note]) if rows else ""


_TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "serve": _serve_tables,
    "engine": _engine_table,
    "kernels": _kernels_table,
    "rpc": _rpc_table,
    "tracing": _tracing_table,
    "peers": _peers_table,
    "interference": _interference_table,
}

_IN_README = ("serve", "interference")


def _table(title: str, heads: Row, rows: Sequence[Row], notes: Sequence[str]) -> str:
    aligned = ["---" if index == 0 else "---:" for index in range(len(heads))]
    lines = [f"**{title}** (medians)", "", *("| " + " | ".join(row) + " |" for row in (heads, aligned, *rows))]
    return "\n".join([*lines, *(f"\n{note}" for note in notes), ""])


def _notes(results: Sequence[Result]) -> list[str]:
    notes = []
    if any(result.configuration.get("synthetic") for result in results):
        notes.append(
            "\\* A synthetic pair: random weights of a real model's shape, the acceptance chosen by whoever made it. "
            "The times are those of the system; the acceptance is not a property of any model."
        )
    if any(_is_noise(result.configuration) for result in results):
        notes.append(
            "† Noise for weights (`--load-format dummy`): a shape alone, whose text and acceptance mean nothing."
        )
    return notes


def _pair(configuration: dict[str, Any]) -> str:
    return f"{configuration['pair']}{_mark(configuration)}"


def _mark(configuration: dict[str, Any]) -> str:
    return (" \\*" if configuration.get("synthetic") else "") + (" †" if _is_noise(configuration) else "")


def _is_noise(configuration: dict[str, Any]) -> bool:
    return configuration.get("load_format") == "dummy"


def _device(result: Result) -> str:
    environment = result.environment
    return f"{environment.cpu}, {environment.num_cpus} cores" if environment.device == "cpu" else environment.device


def _median(result: Result, name: str, **labels: str) -> float | None:
    found = result.find(name, **labels)
    return None if found is None else median(found.samples)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
