"""``outrider bench peers``: other engines on the same pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Device, Dtype, Save
from outrider.cli.bench.harness import bar, benchmark, is_synthetic, pair_name, print_weights_notes, save, table
from outrider.cli.options import output
from outrider.demo import DRAFT, TARGET
from outrider.errors import ConfigError

_HEADS = ("engine", "first token ms", "ms a token", "tok/s", "prompts as the first")

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
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests in a run.")] = 4,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Prompt tokens.")] = 64,
    output_len: Annotated[int, typer.Option("--output-len", min=2, help="New tokens.")] = 64,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of vLLM's models.")] = 1,
    packages: Annotated[
        Path | None, typer.Option(help="Folder of packages that the engines alone see, such as an unpacked vLLM.")
    ] = None,
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
    folder = None if packages is None else str(packages.absolute())
    names = tuple(peer or bench.installed(folder))
    if draft_model is None and target is not None:
        names = tuple(peer or (name for name in names if name in {"transformers", "transformers-compiled", "vllm"}))
    made = benchmark("serving.workload").random_prompts(num_prompts, input_len, _vocab_size(folders[0]), seed)
    pair = engines.Pair(
        target=str(folders[0]),
        draft=None if folders[1] is None else str(folders[1]),
        device=device,
        dtype="float32" if dtype == "auto" and device == "cpu" else dtype,
        draft_length=num_speculative_tokens,
        max_length=input_len + output_len + num_speculative_tokens + 1,
        tensor_parallel_size=tensor_parallel_size,
        num_users=max_concurrency,
    )
    plan = bench.Plan(engines=names, pair=pair, prompts=tuple(made), num_tokens=output_len, packages=folder)
    with bar("engines", len(names)) as advance:
        outcomes = bench.run_plan(plan, on_done=advance)
    output.print(table(_HEADS, bench.to_rows(outcomes)))
    facts = {"pair": pair_name(*folders), "synthetic": is_synthetic(folders[0])}
    print_weights_notes(facts)
    if save_as is not None:
        save(bench.to_result(outcomes, plan, name=save_as, configuration=facts))


def _vocab_size(folder: Path) -> int:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("TARGET", f"{path} cannot be read: {error}") from error
