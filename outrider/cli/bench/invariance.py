"""``outrider bench invariance``: differences of outputs between batches, drafts and loads."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import PairFlags, Target
from outrider.cli.bench.harness import bar, benchmark, table
from outrider.cli.bench.pairs import Where, find_pair, plan_pair
from outrider.cli.facts import model_text
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import Verbose, output
from outrider.cli.settings_flags import parse_set
from outrider.cli.stack.running import run_with_client
from outrider.client import AsyncClient
from outrider.errors import ConfigError
from outrider.generation import ModelInfo

_HEADS = ("arm", "streams", "differ", "per 10,000 tokens", "other logprobs", "preempted")
_PREEMPTED = re.compile(r"^outrider_sessions_preempted_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class InvarianceFlags:
    """Batches, draft lengths and temperatures that are compared, and the requests of each."""

    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Concurrent requests; may be repeated.", show_default="1, 16, 64"),
    ] = None
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option("--num-speculative-tokens", "-k", min=0, help="May be repeated.", show_default="0, 4"),
    ] = None
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="0 is greedy, others are coupled; may be repeated.", show_default="0, 0.8"),
    ] = None
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of each arm.")] = 64
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 64
    output_len: Annotated[int, typer.Option(min=1, help="New tokens.")] = 256
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Also compare the logprobs of this number of most likely tokens.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and requests.")] = 0

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes of the arms. ``BadParameter`` for one that the requests do not fill."""
        sizes = self.batch_size or [size for size in (1, 16, 64) if size <= self.num_prompts]
        if max(sizes) > self.num_prompts:
            raise typer.BadParameter(f"--batch-size {max(sizes)} needs --num-prompts {max(sizes)} or more")
        return sizes

    @property
    def draft_lengths(self) -> list[int]:
        """Draft lengths of the arms."""
        return self.num_speculative_tokens or [0, 4]

    async def run(
        self, client: AsyncClient, where: Where, metrics_port: str | None = None
    ) -> tuple[ModelInfo, list[tuple[float, Any]]]:
        """Description of the served models, and the outcome of each temperature and arm. ``metrics_port`` is the
        target's; ``ConfigError``, before any request, if it has no metrics.
        """
        count = None if metrics_port is None else _counter_at(metrics_port)
        if count is not None:
            await count()
        bench, info = benchmark("invariance"), await client.model_info()
        arms = bench.arms_of(self.batch_sizes, self.draft_lengths)
        temperatures = self.temperature or [0.0, 0.8]
        prompts, found = self._prompts(where, info.num_token_ids), []
        with bar("requests", len(temperatures) * (1 + len(arms)) * self.num_prompts) as advance:
            for each in temperatures:
                load = bench.Workload(prompts, self.output_len, each, self.seed, self.logprobs)
                found += [
                    (each, one)
                    for one in await bench.run_arms(client, load, arms, on_done=advance, count_preempted=count)
                ]
        return info, found

    def _prompts(self, where: Where, num_token_ids: int) -> tuple[Any, ...]:
        workload = benchmark("serving.workload")
        if where.is_embedded:
            return tuple(workload.code_prompts(self.num_prompts, self.input_len, where.target, self.seed))
        return tuple(workload.random_prompts(self.num_prompts, self.input_len, num_token_ids, self.seed))


@with_flag_groups
def invariance(target: Target = None, *, pair: PairFlags, arms: InvarianceFlags, verbose: Verbose = 0) -> None:
    """Count outputs that differ from those of each request alone without drafts. For chunks and preemption, give the
    target less: --set target.max_batched_tokens=128 --set target.num_pages=400. Preempted sessions are counted with
    --set target.metrics_port=9400.
    """
    where = find_pair(target, pair.draft_model, pair.address)
    port = parse_set(pair.set_options).get(("target", "metrics_port"))
    _ = arms.batch_sizes  # refused before anything is started

    async def measure(client: AsyncClient) -> tuple[ModelInfo, list[tuple[float, Any]]]:
        return await arms.run(client, where, port)

    if where.address is not None:
        info, found = asyncio.run(_at(where.address, measure))
    else:
        stack = plan_pair(where, pair.devices, max(1, *arms.draft_lengths), pair.set_options)
        info, found = asyncio.run(run_with_client(stack, measure, verbose=verbose))
    output.print(model_text(info.target_model, info.target_placement), markup=False)
    output.print(
        table(_HEADS, [_row(temperature, one, has_logprobs=arms.logprobs is not None) for temperature, one in found])
    )


async def _at(address: str, measure: Any) -> Any:  # noqa: ANN401 - a benchmark's
    async with AsyncClient(address) as client:
        return await measure(client)


def _counter_at(port: str) -> Callable[[], Awaitable[int]]:
    """Reader of the number of sessions that the target of a metrics port has preempted."""

    def read() -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return sum(int(float(number)) for number in _PREEMPTED.findall(answer.read().decode()))
        except (OSError, HTTPException) as error:
            raise ConfigError("--set target.metrics_port", f"has no metrics at 127.0.0.1:{port}: {error}") from error

    async def count() -> int:
        return await asyncio.to_thread(read)

    return count


def _row(temperature: float, found: Any, *, has_logprobs: bool) -> tuple[object, ...]:  # noqa: ANN401 - a benchmark's
    name = f"{'greedy' if not temperature else f'coupled at T = {temperature}'}, {found.arm}"
    return (
        name,
        found.num_streams,
        found.num_differing,
        f"{found.per_10_000:.2f}",
        found.num_other_logprobs if has_logprobs else "-",
        "-" if found.num_preempted is None else found.num_preempted,
    )
