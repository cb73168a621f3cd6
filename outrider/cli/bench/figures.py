"""``outrider bench figures``: the figures that the project is judged by, part by part, on one or two GPUs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.bench.harness import benchmark
from outrider.errors import ConfigError


def figures(
    out: Annotated[Path, typer.Argument(help="Folder of results and logs.")] = Path("figures"),
    names: Annotated[
        list[str] | None, typer.Argument(metavar="PART", help="Parts (--list), or single rows. Default: all.")
    ] = None,
    *,
    tiny: Annotated[bool, typer.Option(help="Tiny models on a CPU.")] = False,
    cards: Annotated[int, typer.Option(min=1, help="GPUs of this machine to use.")] = 1,
    gpu_name: Annotated[str, typer.Option(help="Beginning of the results' names.")] = "h200",
    commit: Annotated[str | None, typer.Option(help="Of the code, where the tree is no git checkout.")] = None,
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Command of the part vllm; {pair} is a pair with weights on the disk, {shapes} one without.",
        ),
    ] = None,
    log_choices: Annotated[bool, typer.Option(help="Log every choice of draft lengths.")] = False,
    limit_s: Annotated[
        float | None, typer.Option(min=1, help="Seconds of each part, in place of its own limit.")
    ] = None,
    table_only: Annotated[bool, typer.Option(help="Only print the table of OUT's results.")] = False,
    list_parts: Annotated[bool, typer.Option("--list", help="Only list the parts.")] = False,
) -> None:
    """Measure the figures of benchmarks/results with synthetic pairs, part by part, and print their table.

    Writes OUT/benchmarks/results/*.json and OUT/logs. A part has a time limit of its own, and a row that fails leaves
    the others alone.
    """
    bench = benchmark("figures.run")
    if list_parts:
        bench.print_parts()
        return
    try:
        chosen = bench.find_parts(names or [], most_cards=99 if tiny else cards)
    except KeyError as error:
        raise ConfigError(
            "PART", f"{error} is no part and no row; parts are {', '.join(bench.part_names())}"
        ) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that services are stopped
    session = bench.MeasuringSession(out.absolute(), "tiny" if tiny else gpu_name, tiny, {}, vllm, log_choices)
    bench.measure(session, chosen, commit=commit, limit_s=limit_s, is_table_only=table_only)
    raise typer.Exit(1 if session.failures else 0)
