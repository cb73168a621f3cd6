"""``outrider bench interference``: effect of long prompts, or of new JSON schemas, on running requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import PairFlags, Save, Target
from outrider.cli.bench.harness import benchmark, print_weights_notes, save, table
from outrider.cli.bench.pairs import Where, exact_within, find_pair, plan_pair
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import Verbose, output
from outrider.cli.stack.running import run_with_client
from outrider.client import AsyncClient

_HEADS = ("gaps between messages", "count", "median ms", "p99 ms")


@dataclass(frozen=True, slots=True)
class InterferenceFlags:
    """Running requests, and the long prompts that come beside them."""

    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", min=0, help="Maximum draft length.")
    ] = None
    num_running: Annotated[int, typer.Option(min=1, help="Number of running requests.")] = 8
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of the running requests.")] = 64
    output_len: Annotated[int, typer.Option(min=2, help="New tokens of the running requests.")] = 256
    prefill_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of the long prompts.")] = 8192
    schemas: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON schema a line: short requests with schemas arrive instead of long prompts.",
            show_default=False,
        ),
    ] = None
    num_schemas: Annotated[int, typer.Option(min=1, help="Schemas of a run, 100 a second.")] = 100
    runs: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0

    def plan_schemas(self, num_token_ids: int) -> Any:  # noqa: ANN401 - a benchmark's
        """The benchmark's plan with schemas."""
        bench = benchmark("serving.schemas")
        return bench.SchemaPlan(
            running=tuple(
                benchmark("serving.workload").random_prompts(self.num_running, self.input_len, num_token_ids, self.seed)
            ),
            decoding=benchmark("serving.load").Decoding(
                max_tokens=self.output_len, num_speculative_tokens=self.num_speculative_tokens, seed=self.seed
            ),
            schemas=bench.read_schemas(self.schemas),
            num_arriving=self.num_schemas,
            num_runs=self.runs,
        )

    def plan(self, num_token_ids: int, tie_tolerance: float) -> Any:  # noqa: ANN401 - a benchmark's
        """The benchmark's plan for a vocabulary."""
        random_prompts = benchmark("serving.workload").random_prompts
        return benchmark("serving.interference").InterferencePlan(
            running=tuple(random_prompts(self.num_running, self.input_len, num_token_ids, self.seed)),
            arriving=tuple(random_prompts(4, self.prefill_len, num_token_ids, self.seed + 1)),
            decoding=benchmark("serving.load").Decoding(
                max_tokens=self.output_len, num_speculative_tokens=self.num_speculative_tokens, seed=self.seed
            ),
            num_runs=self.runs,
            tie_tolerance=tie_tolerance,
        )


@with_flag_groups
def interference(
    target: Target = None, *, pair: PairFlags, load: InterferenceFlags, save_as: Save = None, verbose: Verbose = 0
) -> None:
    """Measure the gaps between messages of running requests with and without long prompts, or new JSON schemas,
    beside them.
    """
    where = find_pair(target, pair.draft_model, pair.address)
    if load.schemas is not None:
        _measure_schemas(where, pair, load, verbose)
        return
    bench = benchmark("serving.interference")

    async def measure(client: AsyncClient) -> tuple[Any, Any, dict[str, Any]]:
        info = await client.model_info()
        plan = load.plan(info.num_token_ids, exact_within(pair.device, pair.dtype))
        return plan, await bench.run_plan(client, plan), {"pair": where.pair(info), **where.weights(info)}

    if where.address is not None:
        plan, outcome, facts = asyncio.run(_with_running(where.address, measure))
    else:
        stack = plan_pair(where, pair.devices, load.num_speculative_tokens, pair.set_options)
        plan, outcome, facts = asyncio.run(run_with_client(stack, measure, verbose=verbose))
    _show(outcome)
    facts = {**where.stated(**pair.devices), **facts}
    print_weights_notes(facts)
    if save_as is not None:
        save(bench.to_result(outcome, plan, name=save_as, device=pair.device, configuration=facts))


def _measure_schemas(where: Where, pair: PairFlags, load: InterferenceFlags, verbose: int) -> None:
    bench = benchmark("serving.schemas")

    async def measure(client: AsyncClient) -> Any:  # noqa: ANN401 - a benchmark's
        info = await client.model_info()
        return await bench.run_schemas(client, load.plan_schemas(info.num_token_ids))

    if where.address is not None:
        outcome = asyncio.run(_with_running(where.address, measure))
    else:
        stack = plan_pair(where, pair.devices, load.num_speculative_tokens, pair.set_options)
        outcome = asyncio.run(run_with_client(stack, measure, verbose=verbose))
    statistics_of = benchmark("samples").statistics_of
    rows = []
    for arm, gaps in outcome.gaps.items():
        found, longest = statistics_of(gaps), statistics_of(outcome.longest[arm])
        rows.append((arm, found.count, found.median, found.p99, longest.median, max(outcome.longest[arm])))
    output.print(table((*_HEADS, "longest of a run: median ms", "largest ms"), rows))
    output.print(f"schemas that were refused: {outcome.num_refused}", markup=False)


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
