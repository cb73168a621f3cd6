"""Tables of the parts: an engine, its kernels, the wire, a step without its forwards, tracing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outrider.benchmarks.samples import ratio
from outrider.benchmarks.schema import Result, Series
from outrider.benchmarks.tables.cells import Row, device, mark, mean_of, median_of, notes, number, table
from outrider.benchmarks.tracing.run import MAKING, NOT_SAMPLED, OFF, PLACES, SAMPLED, added_us


def rpc_table(results: Sequence[Result]) -> str:
    """Round trips."""
    heads = ["run", "machine", "call", "over", "bytes there", "bytes back", "median ms", "p99 ms"]
    rows = [
        [
            f"`{result.name}`",
            device(result),
            str(series.labels["call"]),
            str(series.labels["over"]),
            str(series.labels["num_bytes"]),
            str(series.labels["reply_bytes"]),
            number(found.median, 3),
            number(found.p99, 3),
        ]
        for result in results
        for series in result.series
        if (found := series.statistics) is not None
    ]
    return table("The wire alone, a round trip between two processes", heads, rows, []) if rows else ""


def engine_table(results: Sequence[Result]) -> str:
    """Forwards and draft loops beside their floor."""
    heads = ["run", "device", "model", "what", "batch", "tokens", "context", "median ms", "floor ms", "times the floor"]
    rows = [row for result in results for row in _engine_rows(result)]
    return table("The engine beside its floor", heads, rows, notes(results)) if rows else ""


def _engine_rows(result: Result) -> Iterable[Row]:
    facts = result.configuration
    for series in result.series:
        milliseconds, labels = series.median, series.labels
        if milliseconds is not None and "floor_ms" in labels:
            floor = float(labels["floor_ms"])
            yield [
                f"`{result.name}`",
                device(result),
                f"{facts['model']} {facts['dtype']}{_sharing(facts)}{mark(facts)}",
                series.name.replace("_", " ") + _longest(series),
                *(str(labels[key]) for key in ("batch_size", "num_tokens", "context")),
                number(milliseconds, 3),
                number(floor, 3),
                number(ratio(milliseconds, floor), 2),
            ]


def _longest(series: Series) -> str:
    longest = series.labels.get("longest_context")
    return "" if longest is None else f", one row of {longest}"


def _sharing(facts: dict[str, Any]) -> str:
    size = facts.get("tensor_parallel_size", 1)
    return "" if size == 1 else f", shared by {size}"


def kernels_table(results: Sequence[Result]) -> str:
    """Kernels beside their floor."""
    heads = ["run", "device", "kernel", "size", "median us", "floor us", "times the floor"]
    rows = [
        [
            f"`{result.name}`",
            device(result),
            series.name,
            str(series.labels["size"]),
            number(microseconds, 1),
            number(floor, 1),
            number(ratio(microseconds, floor), 2),
        ]
        for result in results
        for series in result.series
        if (microseconds := series.median) is not None and (floor := _floor_us(series)) is not None
    ]
    return table("Kernels beside the time that their bytes take", heads, rows, []) if rows else ""


def _floor_us(series: Series) -> float | None:
    return float(series.labels["floor_us"]) if "floor_us" in series.labels else None


def step_table(results: Sequence[Result]) -> str:
    """Table of the time between two forwards."""
    heads = ["run", "machine", "over", "requests", "T", "between ms", "p99 ms", "coordinator's processor ms"]
    rows = [
        [
            f"`{result.name}`",
            device(result),
            str(series.labels["over"]),
            str(series.labels["num_sessions"]),
            f"{series.labels['temperature']:g}",
            number(found.median, 3),
            number(found.p99, 3),
            number(mean_of(result, "coordinator_processor", series.labels), 3),
        ]
        for result in results
        for series in result.series
        if series.name == "between_forwards" and (found := series.statistics) is not None
    ]
    return table("A step without its two forwards, models of known cost", heads, rows, []) if rows else ""


def tracing_table(results: Sequence[Result]) -> str:
    """Table of the overhead of tracing."""
    heads = ["run", "machine", "where", "off", "more when others are sampled", "more when it is itself"]
    rows = [
        [
            f"`{result.name}`",
            device(result),
            place,
            number(median_of(result, place, arm=OFF), 1),
            *(number(added_us(result.series, place, arm), 1) for arm in (NOT_SAMPLED, SAMPLED)),
        ]
        for result in results
        for place in PLACES
    ]
    makings = [f"{number(median_of(result, MAKING, arm=SAMPLED), 0)} us (`{result.name}`)" for result in results]
    note = f"In threads of their own all three make and encode a sampled step's spans: {', '.join(makings)}."
    return table("What tracing adds to a step's loop, us", heads, rows, [note]) if rows else ""
