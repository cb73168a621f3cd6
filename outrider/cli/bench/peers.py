"""``outrider bench peers``: other engines on the same pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Device, Dtype, Save
from outrider.cli.bench.harness import (
    bar,
    benchmark,
    is_synthetic,
    model_name,
    pair_name,
    print_weights_notes,
    save,
    table,
)
from outrider.cli.options import output
from outrider.demo import DRAFT, TARGET
from outrider.errors import ConfigError

_HEADS = (
    "engine",
    "users",
    "first\ntoken ms",
    "ms a\ntoken",
    "tok/s\nper user",
    "tok/s\nper GPU",
    "prompts as\nthe first",
)

Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", help="Engine to measure; may be repeated.", show_default="all that are installed"),
]


def peers(
    target: Annotated[
        Path | None, typer.Argument(help="Folder of the target.", show_default="the embedded pair's")
    ] = None,
    *,
    draft_model: Annotated[Path | None, typer.Option(help="Folder of the draft.")] = None,
    peer: Peers = None,
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, help="Maximum draft length.")
    ] = 4,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of each number of users, at least.")] = 4,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Prompt tokens.")] = 64,
    output_len: Annotated[int, typer.Option("--output-len", min=2, help="New tokens.")] = 64,
    max_concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Requests at the same time; may be repeated: each engine starts once.", show_default="1"
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed repetitions of each number of users, at least.")] = 3,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of vLLM's models.")] = 1,
    packages: Annotated[
        Path | None, typer.Option(help="Folder of packages that the engines alone see, such as an unpacked vLLM.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of a GPU's memory for vLLM.", show_default="vLLM's own"),
    ] = None,
    load_format: Annotated[str, typer.Option(help="safetensors, or dummy: random weights, for vLLM alone.")] = (
        "safetensors"
    ),
    log: Annotated[Path | None, typer.Option(help="File for all that the engines print.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    save_as: Save = None,
) -> None:
    """Measure other engines on the same pair: greedy, each engine in a process of its own."""
    bench, engines = benchmark("peers.run"), benchmark("peers.engines")
    folders = (TARGET, DRAFT) if target is None else (target, draft_model)
    if packages is not None and not packages.is_dir():
        raise ConfigError("--packages", f"{packages} is not a folder")
    if load_format not in {"safetensors", "dummy"}:
        raise ConfigError("--load-format", f"must be safetensors or dummy, not {load_format!r}")
    folder = None if packages is None else str(packages.absolute())
    users = max_concurrency or [1]
    unfit = set(engines.SPECULATIVE) if folders[1] is None else set()
    unfit |= set(engines.ONE_USER) if max(users) > 1 else set()
    names = tuple(peer or (name for name in bench.installed(folder) if name not in unfit))
    vocab_size, random_prompts = _vocab_size(folders[0]), benchmark("serving.workload").random_prompts
    pair = engines.Pair(
        target=str(folders[0]),
        draft=None if folders[1] is None else str(folders[1]),
        device=device,
        dtype="float32" if dtype == "auto" and device == "cpu" else dtype,
        draft_length=num_speculative_tokens,
        max_length=input_len + output_len + num_speculative_tokens + 1,
        tensor_parallel_size=tensor_parallel_size,
        load_format=load_format,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    plan = bench.Plan(
        engines=names,
        pair=pair,
        loads=bench.make_loads(
            users, runs, num_prompts, lambda count: random_prompts(count, input_len, vocab_size, seed)
        ),
        num_tokens=output_len,
        packages=folder,
        log=log,
    )
    with bar("engines", len(names)) as advance:
        outcomes = bench.run_plan(plan, on_done=advance)
    output.print(table(_HEADS, bench.to_rows(outcomes, pair)))
    facts = {
        "pair": pair_name(*folders),
        "target": model_name(folders[0]),
        "synthetic": is_synthetic(folders[0]),
    }
    print_weights_notes({**facts, "load_format": load_format})
    if save_as is not None:
        save(bench.to_result(outcomes, plan, name=save_as, configuration=facts))


def _vocab_size(folder: Path) -> int:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("TARGET", f"{path} cannot be read: {error}") from error
