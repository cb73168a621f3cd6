"""Measure the figures that the project is judged by, part by part, on one or two GPUs.

    python tools/measure_figures.py OUT users eagle3       # two parts; without names all that the cards allow
    python tools/measure_figures.py OUT users --tiny       # tiny models on a CPU: does everything work?
    python tools/measure_figures.py OUT users vllm --vllm "python peer.py {pair} plain 1,8,32"
    python tools/measure_figures.py OUT users8 --limit-s 300   # one row; table with --table-only, without measuring
    python tools/measure_figures.py --list

Writes OUT/benchmarks/results/*.json and OUT/logs. A part has a time limit of its own, and a row that fails leaves the
others alone. The table comes last. Pairs are synthetic; only vLLM's lies on the disk.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from figures.measuring import measure_part
from figures.parts import PARTS, find_parts
from figures.session import MeasuringSession, environment_of
from figures.table import table

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    out: Annotated[Path, typer.Argument(help="Folder of results and logs.")] = Path("figures"),
    names: Annotated[list[str] | None, typer.Argument(metavar="[PART]...", help="Parts, or single rows.")] = None,
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
    """Measure parts and print their table."""
    if list_parts:
        print("\n".join(f"{part.name:<14} {part.num_cards} card(s), {part.limit_s} s: {part.about}" for part in PARTS))
        return
    try:
        chosen = find_parts(names or [], most_cards=99 if tiny else cards)
    except KeyError as error:
        raise typer.BadParameter(f"{error} is no part and no row", param_hint="PART") from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that services are stopped
    (out / "logs").mkdir(parents=True, exist_ok=True)
    session = MeasuringSession(out.absolute(), "tiny" if tiny else gpu_name, tiny, {}, vllm, log_choices)
    for part in () if table_only else chosen:
        print(f"== {part.name}: {part.about}", flush=True)
        session.environment = environment_of(os.environ, part.num_cards, commit)
        measure_part(session, part, limit_s or part.limit_s)
    print(table(session, chosen))
    raise typer.Exit(1 if session.failures else 0)


if __name__ == "__main__":
    app()
