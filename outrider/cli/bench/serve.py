"""``outrider bench serve``: the whole system, as its users see it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Device, Dtype, LoadFormat, Save, parse_sampling
from outrider.cli.bench.harness import bar, benchmark, print_weights_notes, save
from outrider.cli.bench.pairs import exact_within, find_pair, plan_pair
from outrider.cli.options import Verbose, output
from outrider.cli.settings_flags import SetOptions
from outrider.cli.stack.running import run_with_client
from outrider.client import AsyncClient
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Prompts:
    """What is sent."""

    dataset: str
    tokenizer: Path | None
    count: int
    length: int
    seed: int
    last_token: int | None
    """Of every prompt; a synthetic pair's text follows from it."""


@dataclass(frozen=True, slots=True)
class _Clients:
    """Who sends the requests, and where to."""

    address: str
    num_processes: int
    tls: bool | None = None
    fixed_address: str | None = None
    """Of a coordinator of the same services for the arms of fixed draft lengths."""


def serve(
    target: Annotated[
        Path | None, typer.Argument(help="Folder of the target.", show_default="the embedded pair's")
    ] = None,
    *,
    draft_model: Annotated[Path | None, typer.Option(help="Folder of the draft.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", "-a", help="Measure a running coordinator; start nothing.")
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Alternate with the same requests without speculation, and print the speedup."),
    ] = False,
    first_tokens: Annotated[
        bool,
        typer.Option(
            "--first-tokens",
            help="Before each run also send its requests for one token each, and print the time per token after them.",
        ),
    ] = False,
    cached_prompts: Annotated[
        bool,
        typer.Option(
            "--cached-prompts",
            help="All runs find their prompts in the prefix cache, where the warm-up puts them: decoding alone is"
            " measured.",
        ),
    ] = False,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", min=0, help="Maximum draft length.")
    ] = None,
    fixed_length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Also alternate with this fixed draft length; may be repeated."),
    ] = None,
    fixed_address: Annotated[
        str | None,
        typer.Option(help="Coordinator of the same services with draft_length: fixed, for --fixed-length."),
    ] = None,
    also_sampling: Annotated[
        list[str] | None,
        typer.Option(
            help='Also alternate with these sampling parameters, as JSON: {"temperature": 0.6, "top_p": 0.9}; may be'
            " repeated."
        ),
    ] = None,
    acceptance_method: Annotated[str | None, typer.Option(help="rejection, coupled or typical.")] = None,
    dataset_name: Annotated[
        str | None,
        typer.Option(help="random ids, or code: Outrider's own source.", show_default="code for the embedded pair"),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer for code.", show_default="the target's")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests in a run.")] = 8,
    input_len: Annotated[int, typer.Option("--input-len", "--random-input-len", min=1, help="Prompt tokens.")] = 64,
    output_len: Annotated[int, typer.Option("--output-len", "--random-output-len", min=1, help="New tokens.")] = 64,
    last_token: Annotated[
        int | None, typer.Option(min=0, help="Id of every prompt's last token, from which synthetic text follows.")
    ] = None,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf: all at once.")] = math.inf,
    burstiness: Annotated[float, typer.Option(help="1: Poisson arrivals; smaller values are burstier.")] = 1.0,
    max_concurrency: Annotated[
        int, typer.Option(min=0, help="Maximum number of concurrent requests; 0: no limit.")
    ] = 1,
    client_processes: Annotated[
        int, typer.Option(min=1, help="Processes that send the requests; the users are divided among them.")
    ] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens that are kept; 0 keeps all.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Continue after an end of sequence.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, arrivals and requests.")] = 0,
    runs: Annotated[
        int | None, typer.Option(min=1, help="Runs of each arm.", show_default="1, with --baseline 3")
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Unmeasured requests of each arm.")] = 1,
    gate_prompts: Annotated[
        int, typer.Option(min=0, help="Number of prompts of the correctness gate; 0: no gate, and no --save.")
    ] = 2,
    tie_tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Difference of log-probabilities that counts as a tie.",
            show_default="0.001 in float32, else 0.25",
        ),
    ] = None,
    device: Device = "auto",
    draft_device: Annotated[str | None, typer.Option(help="Device of the draft, if different.")] = None,
    dtype: Dtype = "auto",
    load_format: LoadFormat = "safetensors",
    gpus: Annotated[
        int | None,
        typer.Option(
            "--num-gpus", min=1, help="GPUs in all, for tokens/s per GPU.", show_default="those of the first replicas"
        ),
    ] = None,
    save_as: Save = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the keys of `vllm bench serve --save-detailed`.")
    ] = None,
    set_options: SetOptions = None,
    verbose: Verbose = 0,
) -> None:
    """Measure the whole system: traffic through a coordinator, as its users see it."""
    where = find_pair(target, draft_model, address)
    if save_as is not None and not gate_prompts:
        raise ConfigError("--save", "a result without its correctness gate is not saved: leave --gate-prompts on")
    if json_path is not None and not json_path.parent.is_dir():
        raise ConfigError("--json", f"{json_path.parent} is not a folder")
    bench, workload, load = (benchmark(f"serving.{name}") for name in ("run", "workload", "load"))
    prompts = _Prompts(
        dataset_name or ("code" if where.is_embedded else "random"),
        tokenizer or where.target,
        num_prompts,
        input_len,
        seed,
        last_token,
    )
    if fixed_length and (address is None or fixed_address is None):
        raise ConfigError("--fixed-length", "needs --address and --fixed-address, coordinators of the same services")
    plan = bench.Plan(
        prompts=(),
        traffic=workload.Traffic(request_rate, burstiness, max_concurrency or None),
        decoding=load.Decoding(
            max_tokens=output_len,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            ignore_eos=ignore_eos,
            acceptance_method=acceptance_method,
            num_speculative_tokens=num_speculative_tokens,
            seed=seed,
        ),
        num_runs=runs or (3 if baseline else 1),
        num_warmups=num_warmups,
        with_baseline=baseline,
        with_first_tokens=first_tokens,
        with_cached_prompts=cached_prompts,
        fixed_lengths=tuple(fixed_length or ()),
        samplings=tuple(parse_sampling(text, "--also-sampling") for text in also_sampling or ()),
        num_gate_prompts=min(gate_prompts, num_prompts),
        tie_tolerance=exact_within(device, dtype) if tie_tolerance is None else tie_tolerance,
    )
    devices = {"device": device, "draft_device": draft_device or device, "dtype": dtype, "load_format": load_format}
    if where.address is not None:
        clients = _Clients(where.address, client_processes, fixed_address=fixed_address)
        plan, outcome = asyncio.run(_with_running(clients, plan, prompts))
    else:
        stack = plan_pair(where, devices, num_speculative_tokens, set_options)
        plan, outcome = asyncio.run(
            run_with_client(
                stack,
                lambda client: _measure(client, plan, prompts, _Clients(stack.address, client_processes, tls=False)),
                verbose=verbose,
            )
        )
    for text in bench.texts(outcome, plan):
        output.print(text, markup=False)
    if json_path is not None:
        json_path.write_text(json.dumps(bench.to_vllm_json(outcome, plan)) + "\n", encoding="utf-8")
    facts = {
        "pair": where.pair(outcome.info),
        "dataset": prompts.dataset,
        "client_processes": client_processes,
        **where.told(settings=sorted(set_options or ()), **devices),
        **where.weights(outcome.info),
    }
    print_weights_notes(facts)
    if save_as is not None:
        save(bench.to_result(outcome, plan, name=save_as, device=device, configuration=facts, gpus=gpus))


async def _with_running(clients: _Clients, plan: Any, prompts: _Prompts) -> tuple[Any, Any]:  # noqa: ANN401
    async with AsyncClient(clients.address) as client:
        return await _measure(client, plan, prompts, clients)


async def _measure(client: AsyncClient, plan: Any, prompts: _Prompts, clients: _Clients) -> tuple[Any, Any]:  # noqa: ANN401
    """The plan with its prompts, and its outcome."""
    whole = plan.with_prompts(await _make(client, prompts))
    async with AsyncExitStack() as stack:
        loads: dict[str, Any] = {}
        for name, address in (("load", clients.address), ("load_fixed", clients.fixed_address)):
            if address is not None and (clients.num_processes > 1 or name == "load_fixed"):
                processes = benchmark("serving.client_processes").ClientProcesses
                sending = processes(address, clients.num_processes, tls=clients.tls)
                loads[name] = (await stack.enter_async_context(sending)).run_load
        with bar("requests", whole.num_requests) as advance:
            return whole, await benchmark("serving.run").run_plan(client, whole, on_done=advance, **loads)


async def _make(client: AsyncClient, prompts: _Prompts) -> Sequence[tuple[int, ...]]:
    workload = benchmark("serving.workload")
    if prompts.dataset == "random":
        info = await client.model_info()
        made = workload.random_prompts(prompts.count, prompts.length, info.num_token_ids, prompts.seed)
    elif prompts.dataset != "code":
        raise ConfigError("--dataset-name", f"must be random or code, not {prompts.dataset!r}")
    elif prompts.tokenizer is None:
        raise ConfigError("--tokenizer", "is needed for code: with --address nothing else says which it is")
    else:
        made = workload.code_prompts(prompts.count, prompts.length, prompts.tokenizer, prompts.seed)
    if prompts.last_token is None:
        return list(made)
    return [(*prompt[:-1], prompts.last_token) for prompt in made]
