"""The table: a line or a few for each row; in brackets what is wanted."""

from __future__ import annotations

from outrider.benchmarks.figures.rows import AnyRow, CommandRow, ForwardComparison, LoadRow, Part, PeerRow
from outrider.benchmarks.figures.session import MeasuringSession
from outrider.benchmarks.samples import ratio
from outrider.benchmarks.schema import Result, Series, load
from outrider.benchmarks.tables.cells import arms_of, best_fixed, median_of
from outrider.benchmarks.tables.serving import other_samplings
from outrider.benchmarks.tables.short import outside_services_ms, short_lines

_HEADS = (
    "ms per token until all have finished, with chosen draft lengths / without drafts: with the prefill, and after the "
    "first tokens; aims in brackets"
)


def table(session: MeasuringSession, parts: list[Part]) -> str:
    """All rows of these parts, in order."""
    return "\n".join([_HEADS, *(line for part in parts for row in part.rows for line in lines_of(session, row))])


def lines_of(session: MeasuringSession, row: AnyRow) -> list[str]:
    """The row's figures, each line under the row's name."""
    failure = session.failures.get(row.name)
    if failure:
        return [_line(row.name, f"FAILED: {failure}")]
    if isinstance(row, PeerRow):
        return _peer_lines(session, row)
    results = [load(path) for path in session.results_of(row.name)]
    if not results:
        return [_line(row.name, "not measured")]
    return [load_line(row, results[0])] if isinstance(row, LoadRow) else _command_lines(row, results)


def _line(name: str, told: str) -> str:
    return f"{name:<26} {told}"


def load_line(row: LoadRow, result: Result) -> str:
    """Figures of one load."""
    until, after, rates = (
        [median_of(result, name, arm=arm) for arm in ("speculation", "baseline")]
        for name in ("until_all_finished", "after_first_tokens", "output_throughput")
    )
    first = median_of(result, "ttft", arm="speculation")
    best = best_fixed(result)
    over_best = rates[0] / max(best[1], rates[1] or 0.0) if rates[0] and best else None
    over_fixed = ""
    if best is not None:
        over = _figure(over_best, row.wanted_over_best, 3)
        over_fixed = f", over the best fixed length {over} ({best[0]} {best[1]:.0f} tok/s)"
    fixed = "".join(
        f", {arm} {_figure(median_of(result, 'after_first_tokens', arm=arm), None, 2)}"
        for arm in arms_of(result)
        if arm.startswith("K=")
    )
    decoding = ""
    if after[0] is not None:
        decoding = f"after the first {_figure(after[0], row.wanted_ms, 2)} / {_figure(after[1], None, 2)} ms{fixed}, "
    return _line(
        row.name,
        f"{_figure(until[0], None, 2)} / {_figure(until[1], None, 2)} ms, {decoding}TTFT {first or 0:.1f} ms, "
        f"draft length {_figure(_drafted(result), None, 2)}, "
        f"outside the services {_figure(outside_services_ms(result), row.wanted_between_ms, 2)} ms a step, "
        f"speedup {_figure(ratio(*rates), row.wanted_over_plain, 3)}{over_fixed}{_sampled(result)}",
    )


def _drafted(result: Result) -> float | None:
    """Tokens of a draft, chosen."""
    figures = result.figures["speculation"]
    return ratio(*(figures.get(f"spec_decode_{name}") for name in ("draft_tokens", "num_drafts")))


def _sampled(result: Result) -> str:
    steps = {name: median_of(result, "decode_total", arm=name) for name in other_samplings(result)}
    alone = median_of(result, "decode_total", arm="speculation")
    return "".join(
        f", {name} step over greedy's {taken / alone:.3f} (1.06)" for name, taken in steps.items() if taken and alone
    )


def _figure(value: float | None, wanted: float | None, digits: int) -> str:
    told = "-" if value is None else f"{value:.{digits}f}"
    return told if wanted is None else f"{told} ({wanted:g})"


def _command_lines(row: CommandRow, results: list[Result]) -> list[str]:
    """Comparisons, or else all that its results are looked at for."""
    if row.comparisons:
        return [_line(row.name, _compared(results[0], comparison)) for comparison in row.comparisons]
    if results[0].kind == "serve":
        return [load_line(LoadRow(result.name, row.services, 0), result) for result in results]
    told = [line.removeprefix(result.name).strip() for result in results for line in short_lines([result])]
    return [_line(row.name, line) for line in (*told, *([f"wanted: {row.wanted}"] if row.wanted else []))]


def _compared(result: Result, comparison: ForwardComparison) -> str:
    """The comparison by each clock: of the whole call, and on a GPU of the device alone."""
    found = (f"{name} {told}" for name in ("forward", "forward_on_device") if (told := _over(result, name, comparison)))
    return f"{comparison.about}: {', '.join(found) or 'not measured'}"


def _over(result: Result, name: str, comparison: ForwardComparison) -> str:
    series = _find(result, name, comparison.labels, is_long=comparison.is_long)
    if series is None:
        return ""
    above, below = series.median, float(series.labels["floor_ms"])
    if comparison.over is not None:
        other = _find(result, name, comparison.over, is_long=False)
        below = (other and other.median) or 0.0
    over = ratio(above, below)
    return "" if over is None else f"{over:.3f} ({above:.3f} over {below:.3f} ms)"


def _find(result: Result, name: str, labels: dict[str, int], *, is_long: bool) -> Series | None:
    """The series with these labels, with a longest context or without: tiny models have a shorter one."""
    for series in result.series:
        is_wanted = series.name == name and labels.items() <= series.labels.items()
        if is_wanted and ("longest_context" in series.labels) == is_long:
            return series
    return None


def _peer_lines(session: MeasuringSession, row: PeerRow) -> list[str]:
    """Our chosen and plain lines of the same folder, and what the command printed."""
    path = session.log(row.name)
    if not path.exists():
        return [_line(row.name, "skipped: no --vllm COMMAND")]
    ours = sorted(session.results.glob(f"{session.name}-users*.json"), key=lambda found: (len(found.name), found.name))
    told = [_line(row.name, line) for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return [*(load_line(LoadRow(found.stem, row.services, 0), load(found)) for found in ours), *told]
