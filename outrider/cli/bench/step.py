"""``outrider bench step``: the time between the two forwards of a step."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.bench.flags import Samples, Save, Warmups
from outrider.cli.bench.harness import bar, benchmark, save, table
from outrider.cli.options import output

_HEADS = ("sessions", "temperature", "between ms", "p99 ms", "coordinator cpu", "draft", "target", "accept", "wire")
_PART_HEADS = ("sessions", "temperature", "side", "there", "hand in", "forward", "hand out", "back", "turn after")

Sessions = Annotated[
    list[int] | None,
    typer.Option("--sessions", min=1, help="Concurrent requests; may be repeated.", show_default="1, 32"),
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option("--temperature", min=0, help="0 is greedy; may be repeated.", show_default="0, 1"),
]


def step(
    *,
    sessions: Sessions = None,
    temperature: Temperatures = None,
    over: Annotated[str, typer.Option(help="tcp or unix.")] = "tcp",
    draft_ms: Annotated[float, typer.Option(min=0, help="Simulated time of a proposal, in milliseconds.")] = 3.0,
    target_ms: Annotated[float, typer.Option(min=0, help="Simulated time of scoring, in milliseconds.")] = 5.0,
    num_speculative_tokens: Annotated[
        int, typer.Option("-k", "--num-speculative-tokens", min=0, help="Draft length; 0 for the target alone.")
    ] = 4,
    pinned_cpus: Annotated[
        int | None,
        typer.Option("--num-pinned-cpus", min=0, help="Value of the setting num_pinned_cpus. Default: the setting's."),
    ] = None,
    samples: Samples = 300,
    warmups: Warmups = 50,
    save_as: Save = None,
) -> None:
    """Measure a step without its forwards: three processes, simulated models."""
    bench = benchmark("step.run")
    plan = bench.StepPlan(
        num_sessions=tuple(sessions or (1, 32)),
        temperatures=tuple((0.0, 1.0) if temperature is None else temperature),
        over=over,
        draft_ms=draft_ms,
        target_ms=target_ms,
        num_speculative_tokens=num_speculative_tokens,
        num_pinned_cpus=pinned_cpus,
        num_samples=samples,
        num_warmups=warmups,
    )
    with bar("cases", plan.num_cases) as advance:
        series = bench.run_plan(plan, on_done=advance)
    output.print(table(_HEADS, bench.to_rows(series)))
    output.print()
    output.print(table(_PART_HEADS, bench.to_part_rows(series)))
    if save_as is not None:
        save(bench.to_result(series, plan, name=save_as))
