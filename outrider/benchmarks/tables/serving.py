"""Tables of what users see: serving, other engines, long prompts beside running requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.benchmarks.samples import ratio
from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import Row, acceptance_rate, device, median_of, notes, number, pair, table


def _serve_table(results: Sequence[Result]) -> str:
    heads = ["run", "device", "pair", "T", "K", "users", "tok/s", "tok/s, K = 0", "speedup",
             "acceptance rate", "mean acceptance length", "TTFT ms", "TPOT ms", "TPOT ms, K = 0"]  # fmt: skip
    return table("Serving, three processes", heads, [_serve_row(result) for result in results], notes(results))


def _serve_row(result: Result) -> Row:
    configuration, figures = result.configuration, result.figures["speculation"]
    users = configuration["traffic"]["max_concurrency"]
    return [
        f"`{result.name}`",
        device(result),
        pair(configuration),
        f"{configuration['decoding']['temperature']:g}",
        str(configuration["num_speculative_tokens"]),
        "all" if users is None else str(users),
        number(median_of(result, "output_throughput", arm="speculation"), 1),
        number(median_of(result, "output_throughput", arm="baseline"), 1),
        number(median_of(result, "speedup"), 2),
        number(acceptance_rate(figures), 2),
        number(figures.get("spec_decode_acceptance_length"), 2),
        number(median_of(result, "ttft", arm="speculation"), 1),
        number(median_of(result, "tpot", arm="speculation"), 2),
        number(median_of(result, "tpot", arm="baseline"), 2),
    ]


def _steps_table(results: Sequence[Result]) -> str:
    stages = ("draft", "target", "accept", "wire", "total")
    rows = [
        [f"`{r.name}`", *(number(median_of(r, f"step_{stage}", arm="speculation"), 2) for stage in stages)]
        for r in results
    ]
    return table("Step time by stage, ms, prefill included", ["run", *stages], rows, [])


def serve_tables(results: Sequence[Result]) -> str:
    """Tables of what users see, and of the time of a step."""
    return "\n".join([_serve_table(results), _steps_table(results)]) if results else ""


def interference_table(results: Sequence[Result]) -> str:
    """Gaps of running requests, alone and beside a prefill."""
    heads = ["run", "device", "pair", "K", "running", "prefill tokens", "p99 without, ms", "p99 with, ms", "ratio"]
    rows = []
    for result in results:
        facts, gaps = result.configuration, [result.find("itl", arm=arm) for arm in ("alone", "beside a prefill")]
        p99s = [None if found is None or found.statistics is None else found.statistics.p99 for found in gaps]
        named = [facts["num_speculative_tokens"], facts["num_running"], facts["prefill_tokens"]]
        rows.append(
            [
                f"`{result.name}`",
                device(result),
                pair(facts),
                *("default" if value is None else str(value) for value in named),
                *(number(value, 1) for value in p99s),
                number(ratio(p99s[1], p99s[0]), 2),
            ]
        )
    title = "Gaps between messages of running requests while a long prompt is prefilled"
    return table(title, heads, rows, notes(results)) if rows else ""


def peers_table(results: Sequence[Result]) -> str:
    """Other engines."""
    heads = ["run", "device", "pair", "engine", "K", "tokens in", "out", "TTFT ms", "TPOT ms", "prompts that differ"]
    rows = [row for result in results for row in _peer_rows(result)]
    return table("Other engines, one request at a time", heads, rows, notes(results)) if rows else ""


def _peer_rows(result: Result) -> Iterable[Row]:
    facts = result.configuration
    for engine, num_different in result.figures["prompts_that_differ"].items():
        speculates = engine.endswith(("assisted", "speculative"))
        yield [
            f"`{result.name}`",
            device(result),
            pair(facts),
            engine,
            str(facts["draft_length"]) if speculates else "0",
            ", ".join(map(str, facts["input_lens"])),
            str(facts["output_len"]),
            number(median_of(result, "ttft", engine=engine), 1),
            number(median_of(result, "tpot", engine=engine), 2),
            f"{num_different}/{facts['num_prompts']}",
        ]
