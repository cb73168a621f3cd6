"""A stack on a terminal: shows its state, runs until a signal, stops in order.

The first signal stops gracefully, the second at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import typer
from rich.console import Console

from outrider.cli.options import progress
from outrider.cli.stack.bars import StartBars
from outrider.cli.stack.plan import ServiceSpec, StackPlan
from outrider.cli.stack.probe import is_serving
from outrider.cli.stack.supervisor import Stack
from outrider.client import AsyncClient
from outrider.errors import OutriderError
from outrider.telemetry.progress import ByteProgress
from outrider.types import ModelDescription

ResultT = TypeVar("ResultT")

EVERYTHING = 2
"""Verbosity at which all that the services write is shown."""

_NAMES_OF_REQUESTS = ("request_id", "trace_id")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TerminalListener:
    """Shows the state of the services on standard error; with -vv also their output.

    On a terminal the first start is shown as bars, otherwise as lines.
    """

    def __init__(self, verbose: int, console: Console = progress) -> None:
        self._verbose = verbose
        self._console = console
        can_draw = console.is_terminal and not console.is_dumb_terminal
        self._bars = StartBars(console) if can_draw and verbose < EVERYTHING else None

    def close(self) -> None:
        """Show lines from now on, because other output follows that bars would overwrite."""
        if self._bars is not None:
            self._bars.close()
            self._bars = None

    def starting(self, spec: ServiceSpec) -> None:
        """A bar begins; at -v also a line."""
        if self._bars is not None:
            self._bars.begin(spec.name)
        if self._verbose:
            self._console.print(f"{spec.name}: starting {spec.module} at {spec.address}", markup=False)

    def serving(self, spec: ServiceSpec) -> None:
        """Always: loading may take a while."""
        if self._bars is not None:
            self._bars.end(spec.name)
        self._console.print(f"{spec.name}: serving", markup=False, style="dim")

    def lost(self, spec: ServiceSpec, reason: str, retry_in_s: float) -> None:
        """Always: someone should know."""
        self._console.print(
            f"{spec.name}: ended: {reason}; starting it again in {retry_in_s:g} s", markup=False, style="red"
        )

    def line(self, spec: ServiceSpec, text: str) -> None:
        """Print a line: progress and warnings always, logs at -v, everything at -vv."""
        if self._verbose >= EVERYTHING:
            self._console.print(f"{spec.name}| {text}", markup=False, style="dim")
        elif self._bars is not None and (step := step_in(text)):
            self._bars.show(spec.name, *step)
        elif message := shown(text, everything=self._verbose > 0):
            self._console.print(f"{spec.name}: {message}", markup=False, style="dim")


def shown(line: str, *, everything: bool) -> str:
    """The message in a line of a service's log, if people should see it; else nothing."""
    record = _record(line)
    is_progress = record.get("logger") == ByteProgress.__module__
    is_trouble = record.get("level") in {"warning", "error", "critical"}
    if not (everything or is_progress or is_trouble):
        return ""
    named = "".join(f" {key}={record[key]}" for key in _NAMES_OF_REQUESTS if key in record)
    return str(record.get("message", "")) + named


def step_in(line: str) -> tuple[str, int, int] | None:
    """Progress in a line of a service's log: a message, the amount done, the total."""
    record = _record(line)
    if record.get("logger") != ByteProgress.__module__ or not {"message", "done", "total"} <= record.keys():
        return None
    return str(record["message"]), int(record["done"]), int(record["total"])


def _record(line: str) -> dict[str, Any]:
    """A line of a service's log; nothing when it is another line."""
    try:
        record = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return dict(record)


Described = dict[str, ModelDescription]
"""Descriptions of targets and drafts by name; without those that could not be asked."""


async def run_until_signal(plan: StackPlan, *, verbose: int, on_ready: Callable[[StackPlan, Described], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; raises ``UnavailableError`` when a service cannot start."""

    async def serve() -> None:
        on_ready(plan, await _describe_models(plan))
        await asyncio.Event().wait()

    with contextlib.suppress(asyncio.CancelledError):
        await _until_signal(_inside_stack(plan, verbose, serve))
    progress.print("stopped", style="dim")


async def run_with_client(
    plan: StackPlan, work: Callable[[AsyncClient], Awaitable[ResultT]], *, verbose: int
) -> ResultT:
    """Run work against the services, and stop them; a signal ends it with exit code 130."""

    async def with_client() -> ResultT:
        async with AsyncClient(plan.address, tls=False) as client:
            return await work(client)

    try:
        return await _until_signal(_inside_stack(plan, verbose, with_client))
    except asyncio.CancelledError:
        raise typer.Exit(130) from None


async def _until_signal(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The work's result; the first signal cancels it, which stops politely, a second one cancels the stopping too."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    return await task


async def _inside_stack(plan: StackPlan, verbose: int, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    listener = TerminalListener(verbose)
    if plan.note:
        progress.print(plan.note, style="dim", markup=False)
    with contextlib.closing(listener):
        async with Stack(plan, probe=partial(is_serving, waits=True), listener=listener) as stack:
            listener.close()
            return await stack.watch(work())


async def _describe_models(plan: StackPlan) -> Described:
    from outrider.transport.remote import (
        RemoteDraft,
        RemoteTarget,
    )  # needs numpy, which is not part of the base install

    described: Described = {}
    for spec in plan.models:
        remote = (RemoteTarget if spec.module == "outrider_target" else RemoteDraft)(spec.address, plan.link)
        with contextlib.suppress(OutriderError):  # it died meanwhile: the stack starts it again
            described[spec.name] = await remote.describe()
    return described
