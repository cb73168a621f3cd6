"""``outrider bench serve``: the whole system, as its users see it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import PairFlags, Save, Target, parse_sampling
from outrider.cli.bench.harness import bar, benchmark, print_weights_notes, save
from outrider.cli.bench.pairs import Where, exact_within, find_pair, plan_pair
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import Verbose, output
from outrider.cli.stack.running import run_with_client
from outrider.client import AsyncClient
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """Prompts of the requests."""

    dataset_name: Annotated[
        str | None,
        typer.Option(help="random ids, or code: Outrider's own source.", show_default="code for the embedded pair"),
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer for code.", show_default="the target's")
    ] = None
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests in a run.")] = 8
    input_len: Annotated[int, typer.Option("--input-len", "--random-input-len", min=1, help="Prompt tokens.")] = 64
    last_token: Annotated[
        int | None, typer.Option(min=0, help="Id of every prompt's last token, from which synthetic text follows.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, arrivals and requests.")] = 0


@dataclass(frozen=True, slots=True)
class TrafficFlags:
    """Arrival of the requests, and the processes that send them."""

    request_rate: Annotated[float, typer.Option(help="Requests per second; inf: all at once.")] = math.inf
    burstiness: Annotated[float, typer.Option(help="1: Poisson arrivals; smaller values are burstier.")] = 1.0
    max_concurrency: Annotated[int, typer.Option(min=0, help="Maximum number of concurrent requests; 0: no limit.")] = 1
    client_processes: Annotated[
        int, typer.Option(min=1, help="Processes that send the requests; the users are divided among them.")
    ] = 1


@dataclass(frozen=True, slots=True)
class DecodingFlags:
    """Length and sampling of the output."""

    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", min=0, help="Maximum draft length.")
    ] = None
    acceptance_method: Annotated[str | None, typer.Option(help="rejection, coupled or typical.")] = None
    output_len: Annotated[int, typer.Option("--output-len", "--random-output-len", min=1, help="New tokens.")] = 64
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Nucleus sampling mass.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens that are kept; 0 keeps all.")] = 0
    ignore_eos: Annotated[bool, typer.Option(help="Continue after an end of sequence.")] = True

    def decoding(self, seed: int) -> Any:  # noqa: ANN401 - a benchmark's
        """Options of each request."""
        return benchmark("serving.load").Decoding(
            max_tokens=self.output_len,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            ignore_eos=self.ignore_eos,
            acceptance_method=self.acceptance_method,
            num_speculative_tokens=self.num_speculative_tokens,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class ArmFlags:
    """Arms that take turns with the measured requests, and the gate."""

    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Alternate with the same requests without speculation, and print the speedup."),
    ] = False
    first_tokens: Annotated[
        bool,
        typer.Option(
            "--first-tokens",
            help="Before each run also send its requests for one token each, and print the time per token after them.",
        ),
    ] = False
    cached_prompts: Annotated[
        bool,
        typer.Option(
            "--cached-prompts",
            help="All runs find their prompts in the prefix cache, where the warm-up puts them: decoding alone is"
            " measured.",
        ),
    ] = False
    fixed_length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Also alternate with this fixed draft length; may be repeated."),
    ] = None
    fixed_address: Annotated[
        str | None,
        typer.Option(help="Coordinator of the same services with draft_length: fixed, for --fixed-length."),
    ] = None
    also_sampling: Annotated[
        list[str] | None,
        typer.Option(
            help='Also alternate with these sampling parameters, as JSON: {"temperature": 0.6, "top_p": 0.9}, also with'
            " a json_schema or regex that the output matches; may be repeated."
        ),
    ] = None
    runs: Annotated[int | None, typer.Option(min=1, help="Runs of each arm.", show_default="1, with --baseline 3")] = (
        None
    )
    num_warmups: Annotated[int, typer.Option(min=0, help="Unmeasured requests of each arm.")] = 1
    gate_prompts: Annotated[
        int, typer.Option(min=0, help="Number of prompts of the correctness gate; 0: no gate, and no --save.")
    ] = 2
    tie_tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Difference of log-probabilities that counts as a tie.",
            show_default="0.001 in float32, else 0.25",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ResultFlags:
    """Destination of the result."""

    gpus: Annotated[
        int | None,
        typer.Option(
            "--num-gpus", min=1, help="GPUs in all, for tokens/s per GPU.", show_default="those of the first replicas"
        ),
    ] = None
    save_as: Save = None
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the keys of `vllm bench serve --save-detailed`.")
    ] = None

    def check(self, arms: ArmFlags) -> None:
        """Raise a ``ConfigError`` before anything is measured."""
        if self.save_as is not None and not arms.gate_prompts:
            raise ConfigError("--save", "a result without its correctness gate is not saved: leave --gate-prompts on")
        if self.json_path is not None and not self.json_path.parent.is_dir():
            raise ConfigError("--json", f"{self.json_path.parent} is not a folder")


@with_flag_groups
def serve(
    target: Target = None,
    *,
    pair: PairFlags,
    arms: ArmFlags,
    decoding: DecodingFlags,
    prompts: PromptFlags,
    traffic: TrafficFlags,
    result: ResultFlags,
    verbose: Verbose = 0,
) -> None:
    """Measure the whole system: traffic through a coordinator, as its users see it."""
    where = find_pair(target, pair.draft_model, pair.address)
    result.check(arms)
    bench = benchmark("serving.run")
    if arms.fixed_length and (pair.address is None or arms.fixed_address is None):
        raise ConfigError("--fixed-length", "needs --address and --fixed-address, coordinators of the same services")
    plan, sent = _plan(pair, arms, decoding, prompts, traffic), _sent(prompts, where)
    num_processes = traffic.client_processes
    if where.address is not None:
        clients = _Clients(where.address, num_processes, fixed_address=arms.fixed_address)
        plan, outcome = asyncio.run(_with_running(clients, plan, sent))
    else:
        stack = plan_pair(where, pair.devices, decoding.num_speculative_tokens, pair.set_options)
        clients = _Clients(stack.address, num_processes, tls=False)
        measure = partial(_measure, plan=plan, prompts=sent, clients=clients)
        plan, outcome = asyncio.run(run_with_client(stack, measure, verbose=verbose))
    for text in bench.texts(outcome, plan):
        output.print(text, markup=False)
    if result.json_path is not None:
        result.json_path.write_text(json.dumps(bench.to_vllm_json(outcome, plan)) + "\n", encoding="utf-8")
    facts = {
        "pair": where.pair(outcome.info),
        "dataset": sent.dataset_name,
        "client_processes": num_processes,
        **where.stated(settings=sorted(pair.set_options or ()), **pair.devices),
        **where.weights(outcome.info),
    }
    print_weights_notes(facts)
    if result.save_as is not None:
        name, gpus = result.save_as, result.gpus
        save(bench.to_result(outcome, plan, name=name, device=pair.device, configuration=facts, gpus=gpus))


def _plan(pair: PairFlags, arms: ArmFlags, decoding: DecodingFlags, prompts: PromptFlags, traffic: TrafficFlags) -> Any:  # noqa: ANN401 - a benchmark's
    """The benchmark's plan, still without prompts."""
    return benchmark("serving.run").ServePlan(
        prompts=(),
        traffic=benchmark("serving.workload").Traffic(
            traffic.request_rate, traffic.burstiness, traffic.max_concurrency or None
        ),
        decoding=decoding.decoding(prompts.seed),
        num_runs=arms.runs or (3 if arms.baseline else 1),
        num_warmups=arms.num_warmups,
        with_baseline=arms.baseline,
        with_first_tokens=arms.first_tokens,
        with_cached_prompts=arms.cached_prompts,
        fixed_lengths=tuple(arms.fixed_length or ()),
        samplings=tuple(parse_sampling(text, "--also-sampling") for text in arms.also_sampling or ()),
        num_gate_prompts=min(arms.gate_prompts, prompts.num_prompts),
        tie_tolerance=exact_within(pair.device, pair.dtype) if arms.tie_tolerance is None else arms.tie_tolerance,
    )


def _sent(prompts: PromptFlags, where: Where) -> PromptFlags:
    """The prompts, with the defaults of the pair."""
    name = prompts.dataset_name or ("code" if where.is_embedded else "random")
    return replace(prompts, dataset_name=name, tokenizer=prompts.tokenizer or where.target)


@dataclass(frozen=True, slots=True)
class _Clients:
    """Number and addresses of the clients that send the requests."""

    address: str
    num_processes: int
    tls: bool | None = None
    fixed_address: str | None = None
    """Address of a coordinator of the same services for the arms of fixed draft lengths."""


async def _with_running(clients: _Clients, plan: Any, prompts: PromptFlags) -> tuple[Any, Any]:  # noqa: ANN401
    async with AsyncClient(clients.address) as client:
        return await _measure(client, plan, prompts, clients)


async def _measure(client: AsyncClient, plan: Any, prompts: PromptFlags, clients: _Clients) -> tuple[Any, Any]:  # noqa: ANN401
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


async def _make(client: AsyncClient, prompts: PromptFlags) -> Sequence[tuple[int, ...]]:
    workload, shape = benchmark("serving.workload"), (prompts.num_prompts, prompts.input_len)
    if prompts.dataset_name == "random":
        info = await client.model_info()
        made = workload.random_prompts(*shape, info.num_token_ids, prompts.seed)
    elif prompts.dataset_name != "code":
        raise ConfigError("--dataset-name", f"must be random or code, not {prompts.dataset_name!r}")
    elif prompts.tokenizer is None:
        raise ConfigError("--tokenizer", "is needed for code: with --address nothing else says which it is")
    else:
        made = workload.code_prompts(*shape, prompts.tokenizer, prompts.seed)
    if prompts.last_token is None:
        return list(made)
    return [(*prompt[:-1], prompts.last_token) for prompt in made]
