"""A stack on a terminal: says what is happening, runs until a signal, stops in order.

The first signal stops politely, the second at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from outrider.cli.options import progress
from outrider.cli.stack.plan import ServiceSpec, StackPlan
from outrider.cli.stack.probe import is_serving
from outrider.cli.stack.supervisor import Stack
from outrider.transport.remote import RemoteDraft, RemoteTarget

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TerminalListener:
    """Says on standard error what the services do; at -vv also what they write."""

    def __init__(self, verbose: int) -> None:
        self._verbose = verbose

    def starting(self, spec: ServiceSpec) -> None:
        """At -v."""
        if self._verbose:
            progress.print(f"{spec.name}: starting {spec.module} at {spec.address}", markup=False)

    def serving(self, spec: ServiceSpec) -> None:
        """Always: loading may take a while."""
        progress.print(f"{spec.name}: serving", markup=False, style="dim")

    def lost(self, spec: ServiceSpec, reason: str, retry_in_s: float) -> None:
        """Always: someone should know."""
        progress.print(
            f"{spec.name}: ended: {reason}; starting it again in {retry_in_s:g} s", markup=False, style="red"
        )

    def line(self, spec: ServiceSpec, text: str) -> None:
        """At -vv."""
        if self._verbose > 1:
            progress.print(f"{spec.name}| {text}", markup=False, style="dim")


async def run_until_signal(plan: StackPlan, *, verbose: int, on_ready: Callable[[StackPlan], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; raises ``UnavailableError`` when a service cannot start."""
    serving = asyncio.create_task(_serve(plan, verbose, on_ready))
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        progress.print("stopped", style="dim")


async def _serve(plan: StackPlan, verbose: int, on_ready: Callable[[StackPlan], None]) -> None:
    async with Stack(plan, probe=is_serving, listener=TerminalListener(verbose)):
        if verbose:
            await _report_models(plan)
        on_ready(plan)
        await asyncio.Event().wait()


async def _report_models(plan: StackPlan) -> None:
    for spec in plan.models:
        remote = RemoteTarget(spec.address) if spec.name == "target" else RemoteDraft(spec.address)
        facts = await remote.describe()
        room = f", {facts.num_pages} pages of {facts.page_size} tokens" if facts.num_pages else ""
        progress.print(f"{spec.name}: {facts.model_name} at {spec.address}{room}", markup=False)
