"""``outrider bench tracing``: what tracing costs a step."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.bench.flags import Save
from outrider.cli.bench.harness import bar, benchmark, save, table
from outrider.cli.options import output

_HEADS = ("us a step", "off", "more: others sampled", "more: sampled")


def tracing(
    *,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each request.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with new requests.")] = 20,
    save_as: Save = None,
) -> None:
    """Measure the cost of tracing per step in the loops of all three services, and of building the spans."""
    bench = benchmark("tracing.run")
    plan = bench.TracingPlan(num_steps=steps, num_rounds=rounds)
    with bar("rounds", rounds + 1) as advance:
        series = bench.run_plan(plan, on_done=advance)
    output.print(table(_HEADS, bench.to_rows(series)))
    if save_as is not None:
        save(bench.to_result(series, plan, name=save_as))
