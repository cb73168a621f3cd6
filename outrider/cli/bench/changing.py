"""``outrider bench changing``: chosen draft lengths against plain decoding under a changing number of users."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from outrider.cli.bench.harness import benchmark


def changing(
    address: Annotated[str, typer.Argument(help="Coordinator of services that run already.")],
    *,
    phase: Annotated[
        list[str],
        typer.Option(help="USERSxREQUESTS, such as 128x2: users, and requests of each; may be repeated."),
    ],
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens of a request.")] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each arm, in turn.")] = 2,
    metrics: Annotated[str | None, typer.Option(help="URL of the coordinator's metrics.")] = None,
    device: Annotated[str, typer.Option(help="Where the models run, for --save.")] = "cuda",
    save: Annotated[str | None, typer.Option(help="Write benchmarks/results/NAME-PHASE.json.")] = None,
) -> None:
    """Measure chosen draft lengths against plain decoding while the number of users changes, phase after phase."""
    loads = benchmark("figures.changing_loads")
    decoding = benchmark("serving.load").Decoding(max_tokens=output_len)
    phases = list(map(loads.parse_phase, phase))
    saving = None if save is None else (device, save)
    asyncio.run(loads.compare(address, phases, decoding, input_len=input_len, runs=runs, metrics=metrics, save=saving))
