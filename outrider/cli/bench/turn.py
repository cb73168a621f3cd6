"""``outrider bench turn``: the processor time of a step, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Samples, Warmups
from outrider.cli.bench.harness import bar, benchmark, table
from outrider.cli.options import output

Sessions = Annotated[
    list[int] | None,
    typer.Option("--sessions", min=1, help="Concurrent requests; may be repeated.", show_default="1, 32, 64, 128, 256"),
]


def turn(
    *,
    sessions: Sessions = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    num_speculative_tokens: Annotated[
        int, typer.Option("-k", "--num-speculative-tokens", min=0, help="Draft length; 0 for the target alone.")
    ] = 4,
    samples: Samples = 100,
    warmups: Warmups = 10,
) -> None:
    """Measure what a step costs in processor time, in microseconds per session: one thread, simulated models."""
    bench = benchmark("step.turn")
    plan = bench.TurnPlan(
        num_sessions=tuple(sessions or bench.TurnPlan().num_sessions),
        temperature=temperature,
        num_speculative_tokens=num_speculative_tokens,
        num_samples=samples,
        num_warmups=warmups,
    )
    with bar("cases", len(plan.num_sessions)) as advance:
        rows = [_row(costs, bench.STAGES) for costs in bench.run_turns(plan, on_done=advance)]
    output.print(table(("sessions", *bench.STAGES, "between ms"), rows))


def _row(costs: Any, stages: Sequence[str]) -> tuple[object, ...]:  # noqa: ANN401 - a benchmark's
    return costs.num_sessions, *(costs.micros[stage] for stage in stages), costs.between_forwards_ms
