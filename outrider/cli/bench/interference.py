"""``outrider bench interference``: effect of long prompts on running requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Device, Dtype, LoadFormat, Save
from outrider.cli.bench.harness import benchmark, print_weights_notes, save, table
from outrider.cli.bench.pairs import exact_within, find_pair, plan_pair
from outrider.cli.options import Verbose, output
from outrider.cli.settings_flags import SetOptions
from outrider.cli.stack.running import run_with_client
from outrider.client import AsyncClient

_HEADS = ("gaps between messages", "count", "median ms", "p99 ms")


def interference(
    target: Annotated[
        Path | None, typer.Argument(help="Folder of the target.", show_default="the embedded pair's")
    ] = None,
    *,
    draft_model: Annotated[Path | None, typer.Option(help="Folder of the draft.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", "-a", help="Measure a running coordinator; start nothing.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", min=0, help="Maximum draft length.")
    ] = None,
    num_running: Annotated[int, typer.Option(min=1, help="Number of running requests.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of the running requests.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens of the running requests.")] = 256,
    prefill_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of the long prompts.")] = 8192,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    device: Device = "auto",
    draft_device: Annotated[str | None, typer.Option(help="Device of the draft, if different.")] = None,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "safetensors",
    save_as: Save = None,
    set_options: SetOptions = None,
    verbose: Verbose = 0,
) -> None:
    """Measure the gaps between messages of running requests with and without long prompts beside them."""
    where = find_pair(target, draft_model, address)
    devices = {
        "device": device,
        "draft_device": draft_device or device,
        "dtype": dtype,
        "load_format": load_format,
    }

    async def measure(client: AsyncClient) -> tuple[Any, Any, dict[str, Any]]:
        bench, workload = benchmark("serving.interference"), benchmark("serving.workload")
        info = await client.model_info()
        plan = bench.Plan(
            running=tuple(workload.random_prompts(num_running, input_len, info.num_token_ids, seed)),
            arriving=tuple(workload.random_prompts(4, prefill_len, info.num_token_ids, seed + 1)),
            decoding=benchmark("serving.load").Decoding(
                max_tokens=output_len, num_speculative_tokens=num_speculative_tokens, seed=seed
            ),
            num_runs=runs,
            tie_tolerance=exact_within(device, dtype),
        )
        return plan, await bench.run_plan(client, plan), {"pair": where.pair(info), **where.weights(info)}

    if where.address is not None:
        plan, outcome, facts = asyncio.run(_with_running(where.address, measure))
    else:
        stack = plan_pair(where, devices, num_speculative_tokens, set_options)
        plan, outcome, facts = asyncio.run(run_with_client(stack, measure, verbose=verbose))
    _show(outcome)
    facts = {**where.told(**devices), **facts}
    print_weights_notes(facts)
    if save_as is not None:
        save(
            benchmark("serving.interference").to_result(outcome, plan, name=save_as, device=device, configuration=facts)
        )


async def _with_running(address: str, measure: Any) -> Any:  # noqa: ANN401
    async with AsyncClient(address) as client:
        return await measure(client)


def _show(outcome: Any) -> None:  # noqa: ANN401
    statistics_of = benchmark("samples").statistics_of
    rows = []
    for name, gaps in (("alone", outcome.alone), ("while a long prompt is prefilled", outcome.beside)):
        found = statistics_of(gaps)
        rows.append((name, found.count, found.median, found.p99))
    output.print(table(_HEADS, rows))
    output.print(f"p99 over p99: {outcome.p99_ratio:.2f}", markup=False)
