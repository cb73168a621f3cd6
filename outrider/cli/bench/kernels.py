"""``outrider bench kernels``: the kernels one by one."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.bench.flags import Device, Dtype, Samples, Save, Warmups
from outrider.cli.bench.harness import bar, benchmark, save, table
from outrider.cli.options import output

_HEADS = ("kernel", "size", "median us", "floor us", "times the floor")


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
    output.print(table(_HEADS, bench.to_rows(series)))
    if save_as is not None:
        save(bench.to_result(series, plan, name=save_as, device=device, dtype=dtype))
