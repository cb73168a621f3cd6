"""One line for each thing that a result is looked at for: what is read off a terminal after a run of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from outrider.benchmarks.samples import median, ratio
from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import acceptance_rate, arms_of, median_of, number
from outrider.benchmarks.tables.peers import measurements
from outrider.benchmarks.tracing.run import NOT_SAMPLED, PLACES, SAMPLED, added_us

Line = tuple[str, str]
"""(what, figure with its unit)."""


def short_lines(results: Sequence[Result]) -> list[str]:
    """Lines of three columns: result, what, figure."""
    cells = [(result.name, *line) for result in results for line in LINES[result.kind](result)]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(2)]
    return [f"{name:<{widths[0]}}  {what:<{widths[1]}}  {figure}" for name, what, figure in cells]


def _serve(result: Result) -> Iterable[Line]:
    for arm in arms_of(result):
        per_token, rate = (median_of(result, name, arm=arm) for name in ("tpot", "output_throughput"))
        yield f"{arm}: ms a token, tokens/s", f"{number(per_token, 2)}, {number(rate, 1)}"
    outside = outside_services_ms(result)
    if outside is not None:
        yield "ms of a decode step outside draft and target", number(outside, 2)
    yield "acceptance rate", number(acceptance_rate(result.figures["speculation"]), 3)


def outside_services_ms(result: Result) -> float | None:
    """Milliseconds of a decode step with drafts that are neither the draft's nor the target's: median over requests of
    each one's mean. None where no step was traced, and of a summary, whose samples are no longer those of requests.
    """
    arm = [series for series in result.series if series.labels.get("arm") == "speculation"]
    if any(series.summary is not None for series in arm):
        return None
    found = {series.name: series.samples for series in arm}
    stages = [found.get(f"decode_{name}", ()) for name in ("total", "draft", "target")]
    outside = [total - draft - target for total, draft, target in zip(*stages, strict=True)]
    return median(outside) if outside else None


def _interference(result: Result) -> Iterable[Line]:
    yield "p99 of gaps beside a prefill, over alone", number(result.figures["p99_ratio"], 2)


def _engine(result: Result) -> Iterable[Line]:
    for series in result.series:
        if "floor_ms" in series.labels:
            labels, found = series.labels, series.median
            what = f"{series.name.replace('_', ' ')}, {labels['num_tokens']} tokens, batch {labels['batch_size']}"
            what += f", one row of {labels['longest_context']}" if "longest_context" in labels else ""
            if "temperature" in labels:
                what += f", T={labels['temperature']:g} p={labels['top_p']:g} k={labels['top_k']}"
            over = number(ratio(found, float(labels["floor_ms"])), 2)
            yield what, f"{number(found, 3)} ms, {over} times the floor"


def _kernels(result: Result) -> Iterable[Line]:
    for series in result.series:
        if "floor_us" in series.labels:
            found = series.median
            over = number(ratio(found, float(series.labels["floor_us"])), 2)
            yield f"{series.name}, {series.labels['size']}", f"{number(found, 1)} us, {over} times the floor"


def _rpc(result: Result) -> Iterable[Line]:
    small = result.find("round_trip", call="stream", over="tcp")
    if small is not None:
        yield f"round trip of {small.labels['num_bytes']} bytes", f"{number(small.median, 3)} ms"


def _step(result: Result) -> Iterable[Line]:
    for series in result.series:
        if series.name == "between_forwards":
            what = f"between forwards, {series.labels['num_sessions']} requests, T = {series.labels['temperature']:g}"
            yield what, f"{number(series.median, 3)} ms"


def _tracing(result: Result) -> Iterable[Line]:
    for place in PLACES:
        added = [number(added_us(result.series, place, arm), 1) for arm in (SAMPLED, NOT_SAMPLED)]
        yield f"{place}: more a step when sampled, and when not", f"{added[0]} / {added[1]} us"


def _peers(result: Result) -> Iterable[Line]:
    for measured in measurements(result):
        what = f"{measured.engine}, {measured.num_users} users: ms a token, and until all finished"
        yield what, f"{number(measured.tpot_ms, 2)} / {number(measured.all_ms, 2)}"


LINES: dict[str, Callable[[Result], Iterable[Line]]] = {
    "serve": _serve,
    "interference": _interference,
    "engine": _engine,
    "kernels": _kernels,
    "rpc": _rpc,
    "step": _step,
    "tracing": _tracing,
    "peers": _peers,
}
