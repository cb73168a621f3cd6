"""``outrider bench kernels | tracing | turn``: parts of a step by themselves, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Device, Dtype, Samples, Save, Warmups
from outrider.cli.bench.harness import bar, benchmark, save, table
from outrider.cli.options import output

_KERNEL_HEADS = ("kernel", "size", "median us", "floor us", "times the floor")


def kernels(
    *,
    num_rows: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 32,
    tokens_per_row: Annotated[int, typer.Option(min=1, help="Tokens per sequence in the kernels of a layer.")] = 5,
    num_positions: Annotated[int, typer.Option(min=1, help="Scored positions per sequence.")] = 8,
    samples: Samples = 20,
    warmups: Warmups = 3,
    device: Device = "auto",
    dtype: Dtype = "auto",
    save_as: Save = None,
) -> None:
    """Measure the kernels one by one, each checked first: an 8B model's sizes on a GPU, tiny ones on a CPU."""
    bench = benchmark("kernels.run")
    plan = bench.KernelPlan(num_rows, tokens_per_row, num_positions, num_samples=samples, num_warmups=warmups)
    with bar("kernels", bench.NUM_KERNELS) as advance:
        series = bench.run_plan(plan, device=device, dtype=dtype, on_done=advance)
    output.print(table(_KERNEL_HEADS, bench.to_rows(series)))
    if save_as is not None:
        save(bench.to_result(series, plan, name=save_as, device=device, dtype=dtype))


_TRACING_HEADS = ("us a step", "off", "more: others sampled", "more: sampled")


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
    output.print(table(_TRACING_HEADS, bench.to_rows(series)))
    if save_as is not None:
        save(bench.to_result(series, plan, name=save_as))


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
