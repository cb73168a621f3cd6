"""``outrider demo``: runs the embedded pair as three services, checks exactness and measures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from outrider.cli.options import Verbose, output, progress
from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.plan import StackPlan
from outrider.cli.stack.preparation import extras_of, prepare_stack
from outrider.cli.stack.running import run_with_client
from outrider.client import AsyncClient
from outrider.config import FlagNames, load_all
from outrider.config.fields import DraftMethod
from outrider.config.typed_names import SettingKey
from outrider.demo import DFLASH, DRAFT, EAGLE3, PROMPTS, TARGET, require_pair
from outrider.demo.measure import DemoComparison, DemoWorkload, compare
from outrider.errors import ConfigError
from outrider.process.extras import require_all, require_extras

TEMPERATURES = (0.0, 0.8)
DRAFTS: Mapping[str, Path] = {
    DraftMethod.DRAFT_MODEL.value: DRAFT,
    DraftMethod.EAGLE3.value: EAGLE3,
    DraftMethod.DFLASH.value: DFLASH,
}
"""The embedded draft of each method."""
_SHOWN_PROMPTS = 3
_NUM_NOTES = 4
"""Lines of progress where there is no terminal for a bar."""
_BUSY_LOAD = 1.25
"""Load for each processor above which other processes slow the measurement; its own services take at most one each."""
_FLAGS = {
    ("target", "model"): "--target",
    ("target", "device"): "--device",
    ("draft", "model"): "--draft",
    ("draft", "device"): "--device",
    ("draft", "method"): "--method",
    ("coordinator", "acceptance_method"): "--acceptance-method",
    ("coordinator", "num_speculative_tokens"): "--num-speculative-tokens",
}
"""Setting: the flag that sets it, for errors."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Amount of output."""

    draft_length: int
    max_tokens: int
    num_runs: int


def demo(
    *,
    target: Annotated[Path, typer.Option(help="Folder of the target.", show_default="the embedded one")] = TARGET,
    draft: Annotated[
        Path | None, typer.Option(help="Folder of the draft.", show_default="the embedded one of the method")
    ] = None,
    method: Annotated[
        str, typer.Option(help="How to draft: draft_model, eagle3 or dflash.")
    ] = DraftMethod.DRAFT_MODEL.value,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    acceptance_method: Annotated[str, typer.Option(help="rejection, coupled or typical.")] = "rejection",
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, help="Maximum draft length.")
    ] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each generation.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="Interleaved runs of each measurement.")] = 5,
    verbose: Verbose = 0,
) -> None:
    """Start three services with the embedded pair, stream code, check that greedy output is exact, and measure."""
    options = DemoOptions(num_speculative_tokens, max_tokens, runs)
    more = {
        ("target", "device"): device,
        ("draft", "device"): device,
        ("draft", "method"): method,
        ("coordinator", "acceptance_method"): acceptance_method,
        ("coordinator", "num_speculative_tokens"): num_speculative_tokens,
        ("coordinator", "draft_length"): "fixed",
    }
    if method not in DRAFTS:
        raise ConfigError("method", f"{method} has no draft in the demonstration; such are {', '.join(DRAFTS)}")
    plan = plan_demo(more, target=target, draft=draft or DRAFTS[method])
    is_exact = asyncio.run(run_with_client(plan, lambda client: _show(client, options), verbose=verbose))
    if not is_exact:
        raise typer.Exit(1)


def plan_demo(more: Mapping[SettingKey, object], *, target: Path = TARGET, draft: Path = DRAFT) -> StackPlan:
    """The three services on a pair, with these settings beside what a demonstration always has."""
    settings = {
        ("target", "model"): str(target),
        ("draft", "model"): str(draft),
        # A pair this small gains nothing from a second thread, and loses much where other processes want the cores.
        ("target", "num_threads"): 1,
        ("draft", "num_threads"): 1,
        # Greedy tokens are compared one by one: smaller types let near ties fall either way.
        ("target", "dtype"): "float32",
        ("draft", "dtype"): "float32",
        ("coordinator", "port"): hold_port(),
        **more,
    }
    # A demonstration is the same everywhere: neither variables nor a file have a say.
    effective = load_all(settings, environ={}, flag_names=FlagNames(_FLAGS))
    uses_pair = target == TARGET or draft in DRAFTS.values()
    require_all(
        lambda: require_extras(extras_of(effective.settings), "the demonstration"),
        *([require_pair] if uses_pair else []),
    )
    return prepare_stack(effective)


async def _show(client: AsyncClient, options: DemoOptions) -> bool:
    await _show_streams(client, options)
    is_exact = await _show_exactness(client, options)
    await _show_figures(client, options)
    return is_exact


async def _show_streams(client: AsyncClient, options: DemoOptions) -> None:
    for temperature in TEMPERATURES:
        for prompt in PROMPTS[:_SHOWN_PROMPTS]:
            _heading(f"temperature {temperature:g}")
            output.print(prompt, end="", style="bold", markup=False)
            async for delta in client.stream(
                prompt=prompt, max_tokens=options.max_tokens, temperature=temperature, seed=1
            ):
                output.print(delta.text, end="", markup=False)
            output.print()


async def _show_exactness(client: AsyncClient, options: DemoOptions) -> bool:
    _heading("greedy output, with speculation and without, token by token")
    results = [await _greedy_pair(client, prompt, options) for prompt in PROMPTS]
    for prompt, (ours, alone) in zip(PROMPTS, results, strict=True):
        verdict = f"{len(ours)} tokens, equal" if ours == alone else f"differ at token {_first_difference(ours, alone)}"
        output.print(f"  {prompt.splitlines()[0]!r}: {verdict}", markup=False)
    return all(ours == alone for ours, alone in results)


async def _greedy_pair(
    client: AsyncClient, prompt: str, options: DemoOptions
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    with_draft, alone = [
        await client.generate(
            prompt=prompt, max_tokens=options.max_tokens, temperature=0.0, num_speculative_tokens=length
        )
        for length in (options.draft_length, 0)
    ]
    return with_draft.token_ids, alone.token_ids


def _first_difference(ours: Sequence[int], alone: Sequence[int]) -> int:
    pairs = zip(ours, alone, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(alone)))


async def _show_figures(client: AsyncClient, options: DemoOptions) -> None:
    num_runs = len(TEMPERATURES) * options.num_runs * 2
    with Progress(console=progress, transient=True) as bar:
        task = bar.add_task("measuring", total=num_runs)

        def on_run() -> None:
            bar.advance(task)
            done = round(bar.tasks[0].completed)
            if not progress.is_terminal and done % max(1, num_runs // _NUM_NOTES) == 0:
                progress.print(f"measuring: {done} of {num_runs} runs", markup=False)

        comparisons = [
            await compare(
                client,
                DemoWorkload(PROMPTS[:_SHOWN_PROMPTS], temperature, options.max_tokens),
                draft_length=options.draft_length,
                num_runs=options.num_runs,
                on_run=on_run,
            )
            for temperature in TEMPERATURES
        ]
    if busy := _busy():
        output.print(f"\nnote: {busy}: the figures are noisy; run it on an idle machine", markup=False)
    _heading(
        f"{options.draft_length} draft tokens against none on the same server: "
        f"medians of {options.num_runs} interleaved runs of {_SHOWN_PROMPTS} x {options.max_tokens} tokens"
    )
    output.print(figures_table(comparisons))


def _busy() -> str:
    """Load of this machine, if other processes want its processors too; empty otherwise."""
    load, num_processors = os.getloadavg()[0], os.cpu_count() or 1
    return f"the load of {num_processors} processors is {load:.1f}" if load > _BUSY_LOAD * num_processors else ""


def figures_table(comparisons: Sequence[DemoComparison]) -> Table:
    """A row for each temperature."""
    table = Table(box=None, pad_edge=False)
    for name in (
        "temperature",
        "tokens/s",
        "target alone",
        "speedup",
        "acceptance rate",
        "mean acceptance length",
        "tokens per target pass",
    ):
        table.add_column(name, justify="right", min_width=max(len(word) for word in name.split()))
    for item in comparisons:
        table.add_row(
            f"{item.temperature:g}",
            f"{item.speed:.1f}",
            f"{item.plain_speed:.1f}",
            f"{item.ratio:.2f}",
            _figure(item.acceptance_rate),
            _figure(item.mean_acceptance_length),
            f"{item.tokens_per_pass:.2f}",
        )
    return table


def _figure(value: float | None) -> str:
    return "no data" if value is None else f"{value:.2f}"


def _heading(text: str) -> None:
    output.print(f"\n--- {text} ---", style="dim", markup=False)
