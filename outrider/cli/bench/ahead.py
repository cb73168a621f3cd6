"""``outrider bench ahead``: a timeline of all three services, without drafts, in turn, and drafting ahead."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import PairFlags, Target
from outrider.cli.bench.harness import table
from outrider.cli.bench.pairs import find_pair, plan_pair
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import Verbose, output, progress
from outrider.cli.stack.running import run_with_client
from outrider.cli.trace.reading import read_spans
from outrider.cli.trace.timeline import Timeline, draw_timelines
from outrider.cli.trace.tree import build_tree
from outrider.client import AsyncClient
from outrider.demo import PROMPTS
from outrider.errors import ConfigError, install_command
from outrider.telemetry.tracing import TraceContext
from outrider.telemetry.tracing.context import new_span_id, new_trace_id

_ARMS: dict[str, dict[str, Any]] = {
    "without drafts": {"num_speculative_tokens": 0},
    "in turn": {"draft_ahead": False},
    "ahead": {},
}
"""Options of the requests: all are served by the same three processes."""
_WARM_UPS = 3
_SERVICES = ("target", "draft", "coordinator")


@dataclass(frozen=True, slots=True)
class TimelineFlags:
    """The requests that are drawn, and where to."""

    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, help="Draft length.")
    ] = 4
    steps: Annotated[int, typer.Option(min=1, help="Steps of the slowest request that are drawn.")] = 10
    max_tokens: Annotated[int, typer.Option(min=16, help="New tokens of each request.")] = 96
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0, help="0 is greedy.")] = 0.0
    out: Annotated[Path, typer.Option(help="Drawing without its ending: OUT.svg and OUT.png are written.")] = Path(
        "ahead"
    )


@with_flag_groups
def ahead(target: Target = None, *, pair: PairFlags, drawn: TimelineFlags, verbose: Verbose = 0) -> None:
    """Draw what target, draft and coordinator do over some steps: without drafts, in turn and drafting ahead."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("", f"a timeline needs matplotlib: {install_command('dev')}")
    if pair.address is not None:
        raise ConfigError("--address", "has no part in a timeline, which is of services that it starts")
    if not drawn.out.absolute().parent.is_dir():
        raise ConfigError("--out", f"{drawn.out} cannot be written: its folder is not there")
    where = find_pair(target, pair.draft_model, None)
    if where.draft is None:
        raise ConfigError("--draft-model", "is needed: a timeline is of a target and a draft")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{service}.jsonl" for service in _SERVICES]
        traced = [f"{service}.trace_file={file}" for service, file in zip(_SERVICES, files, strict=True)]
        chosen = ["coordinator.draft_ahead=chain", *(pair.set_options or []), *traced]
        stack = plan_pair(where, pair.devices, drawn.num_speculative_tokens, chosen)
        ids = asyncio.run(run_with_client(stack, lambda client: _ask(client, drawn), verbose=verbose))
        spans = read_spans(files)
    timelines = [Timeline(name, build_tree(spans, trace_id)) for name, trace_id in ids.items()]
    _show(timelines)
    named = [drawn.out.with_name(f"{drawn.out.name}.{ending}") for ending in ("svg", "png")]
    draw_timelines(timelines, named, num_steps=drawn.steps)
    progress.print(f"wrote {named[0]} and {named[1]}", markup=False)


async def _ask(client: AsyncClient, drawn: TimelineFlags) -> dict[str, str]:
    """Ids of the traces by arm, each of a request after some that are not traced."""
    ids = {}
    for name, options in _ARMS.items():
        for number in range(_WARM_UPS + 1):
            context = TraceContext(new_trace_id(), new_span_id(), is_sampled=number == _WARM_UPS)
            await client.generate(
                prompt=PROMPTS[1],
                max_tokens=drawn.max_tokens,
                temperature=drawn.temperature,
                ignore_eos=True,
                seed=1,
                trace_parent=context.trace_parent,
                **options,
            )
        ids[name] = context.trace_id
    return ids


def _show(timelines: list[Timeline]) -> None:
    """Print the figures of all arms."""
    heads = list(timelines[0].figures)
    rows = [(each.name, *(each.figures[head] for head in heads)) for each in timelines]
    output.print(table(("", *heads), rows))
    if not timelines[-1].figures["hits"]:
        progress.print("nothing was drafted ahead: docs/ahead.md says what that needs", style="yellow")
