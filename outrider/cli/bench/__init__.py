"""``outrider bench``: the benchmarks of the package ``benchmarks``, as commands.

Owns flags, progress and printing, and starts the services that ``bench serve`` measures. That package is imported
when a command runs: no other command needs it, the wheel does not have it, and ``bench engine`` needs torch.
"""

from __future__ import annotations

from typing import Any

import typer

from outrider.cli.bench.ahead import ahead
from outrider.cli.bench.ahead_modes import ahead_modes
from outrider.cli.bench.changing import changing
from outrider.cli.bench.engine import engine
from outrider.cli.bench.figures import figures
from outrider.cli.bench.harness import require_benchmarks
from outrider.cli.bench.http import http
from outrider.cli.bench.interference import interference
from outrider.cli.bench.invariance import invariance
from outrider.cli.bench.parts import kernels, tracing, turn
from outrider.cli.bench.peers import peers
from outrider.cli.bench.rpc import rpc
from outrider.cli.bench.serve import serve
from outrider.cli.bench.step import step
from outrider.cli.help import CommandGroup, GroupedCommand
from outrider.cli.options import HELP_NAMES, errors_as_lines


class _BenchmarkCommand(GroupedCommand):
    """A command of the package ``benchmarks``."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - of a library typer brings itself
        with errors_as_lines():
            require_benchmarks()
        return super().invoke(ctx)


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Measure: the whole system, one engine, the wire, a step, tracing, others.",
    context_settings=HELP_NAMES,
    rich_markup_mode=None,
)
for command in (
    *(serve, http, figures, changing, ahead, ahead_modes, interference, invariance),
    *(engine, kernels, rpc, step, turn, tracing, peers),
):
    app.command(cls=_BenchmarkCommand, context_settings=HELP_NAMES)(command)
