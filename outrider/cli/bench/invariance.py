"""``outrider bench invariance``: does output depend on batch, draft and load?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Device, Dtype, LoadFormat
from outrider.cli.bench.harness import bar, benchmark, table
from outrider.cli.bench.pairs import find_pair, plan_pair
from outrider.cli.facts import model_text
from outrider.cli.options import Verbose, output
from outrider.cli.settings_flags import SetOptions
from outrider.cli.stack.running import run_with_client
from outrider.client import AsyncClient

_HEADS = ("arm", "streams", "differ", "per 10,000 tokens", "other logprobs")


def invariance(
    target: Annotated[
        Path | None, typer.Argument(help="Folder of the target.", show_default="the embedded pair's")
    ] = None,
    *,
    draft_model: Annotated[Path | None, typer.Option(help="Folder of the draft.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", "-a", help="Measure a running coordinator; start nothing.")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Concurrent requests; may be repeated.", show_default="1, 16, 64"),
    ] = None,
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option("--num-speculative-tokens", "-k", min=0, help="May be repeated.", show_default="0, 4"),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="0 is greedy, others are coupled; may be repeated.", show_default="0, 0.8"),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of each arm.")] = 64,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 64,
    output_len: Annotated[int, typer.Option(min=1, help="New tokens.")] = 256,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Also compare the logprobs of so many most likely tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and requests.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    load_format: LoadFormat = "safetensors",
    set_options: SetOptions = None,
    verbose: Verbose = 0,
) -> None:
    """Count outputs that differ from those of each request alone without drafts. For chunks and preemption, give the
    target less: --set target.max_batched_tokens=128 --set target.num_pages=400.
    """
    where = find_pair(target, draft_model, address)
    bench = benchmark("invariance")
    lengths = num_speculative_tokens or [0, 4]
    arms = bench.arms_of(batch_size or [1, 16, 64], lengths)
    temperatures = temperature or [0.0, 0.8]

    async def measure(client: AsyncClient) -> tuple[Any, list[tuple[float, Any]]]:
        info = await client.model_info()
        workload = benchmark("serving.workload")
        if where.is_embedded:
            prompts = workload.code_prompts(num_prompts, input_len, where.target, seed)
        else:
            prompts = workload.random_prompts(num_prompts, input_len, info.num_token_ids, seed)
        found = []
        with bar("requests", len(temperatures) * (1 + len(arms)) * num_prompts) as advance:
            for each in temperatures:
                load = bench.Workload(tuple(prompts), output_len, each, seed, logprobs)
                found += [(each, one) for one in await bench.run_arms(client, load, arms, on_done=advance)]
        return info, found

    if where.address is not None:
        info, found = asyncio.run(_at(where.address, measure))
    else:
        devices = {"device": device, "draft_device": device, "dtype": dtype, "load_format": load_format}
        stack = plan_pair(where, devices, max(1, *lengths), set_options)
        info, found = asyncio.run(run_with_client(stack, measure, verbose=verbose))
    output.print(model_text(info.target_model, info.target_placement), markup=False)
    output.print(table(_HEADS, [_row(temperature, one) for temperature, one in found]))


async def _at(address: str, measure: Any) -> Any:  # noqa: ANN401 - a benchmark's
    async with AsyncClient(address) as client:
        return await measure(client)


def _row(temperature: float, found: Any) -> tuple[object, ...]:  # noqa: ANN401 - a benchmark's
    name = f"{'greedy' if not temperature else f'coupled at T = {temperature}'}, {found.arm}"
    return name, found.num_streams, found.num_differing, f"{found.per_10_000:.2f}", found.num_other_logprobs
