"""``outrider bench rpc``: the wire alone."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.bench.flags import Samples, Save, Warmups
from outrider.cli.bench.harness import bar, benchmark, save, table
from outrider.cli.options import output

_HEADS = ("call", "over", "bytes there", "bytes back", "median ms", "p99 ms")

NumBytes = Annotated[
    list[int] | None,
    typer.Option("--num-bytes", min=8, help="Bytes of a request; may be repeated.", show_default="200, 20000, 2000000"),
]
Calls = Annotated[
    list[str] | None, typer.Option("--call", help="unary or stream; may be repeated.", show_default="both")
]
Over = Annotated[list[str] | None, typer.Option("--over", help="tcp or unix; may be repeated.", show_default="both")]


def rpc(
    *,
    num_bytes: NumBytes = None,
    reply_bytes: Annotated[int, typer.Option(min=-1, help="Bytes of a reply; -1: the size of its request.")] = 16,
    call: Calls = None,
    over: Over = None,
    samples: Samples = 200,
    warmups: Warmups = 20,
    save_as: Save = None,
) -> None:
    """Measure the wire alone: round trips between two processes."""
    bench = benchmark("wire.run")
    plan = bench.WirePlan(
        num_bytes=tuple(num_bytes or (200, 20_000, 2_000_000)),
        reply_bytes=None if reply_bytes < 0 else reply_bytes,
        calls=tuple(call or ("unary", "stream")),
        over=tuple(over or ("tcp", "unix")),
        num_samples=samples,
        num_warmups=warmups,
    )
    with bar("cases", plan.num_cases) as advance:
        series = bench.run_plan(plan, on_done=advance)
    output.print(table(_HEADS, bench.to_rows(series)))
    if save_as is not None:
        save(bench.to_result(series, plan, name=save_as))
