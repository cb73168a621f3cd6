"""The ``outrider`` command: subcommands and ``--version``. Each subcommand is a module of this package."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated

from outrider.process.tuning import grpc_environment

os.environ.update(grpc_environment())  # before gRPC is imported

import typer

from outrider import __version__
from outrider.cli.bench import app as bench
from outrider.cli.chat import chat
from outrider.cli.check import check
from outrider.cli.compatibility import ServeCommand
from outrider.cli.config import config
from outrider.cli.demo import demo
from outrider.cli.generate import generate
from outrider.cli.help import CommandGroup, GroupedCommand
from outrider.cli.info import info
from outrider.cli.options import HELP_NAMES, progress
from outrider.cli.serve import serve
from outrider.cli.services import SERVICES
from outrider.cli.trace.command import trace
from outrider.telemetry.output import drain_output

_INTERRUPTED = 130
"""Exit code after Ctrl-C, as of shells."""

app = typer.Typer(
    name="outrider",
    cls=CommandGroup,
    help="Speculative decoding as gRPC microservices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_NAMES,
)
app.command(cls=ServeCommand, context_settings=HELP_NAMES)(serve)
for command in (generate, chat, demo, trace, info, check, config):
    app.command(cls=GroupedCommand, context_settings=HELP_NAMES)(command)
for name, service in SERVICES.items():
    app.command(name, add_help_option=False, context_settings={"ignore_unknown_options": True})(service)
app.add_typer(bench, name="bench")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding as gRPC microservices."""


def main() -> None:
    """Run the console script. Output that cannot be written (full disk) ends it with one line and exit code 1."""
    try:
        app()
    except KeyboardInterrupt:  # while commands are put together; later they see to it themselves
        sys.exit(_INTERRUPTED)
    except OSError as error:
        with contextlib.suppress(OSError, SystemExit):  # it may be the same output
            progress.print(f"error: {error}", style="red", markup=False)
        drain_output()
        # What is still buffered cannot be written either; a plain exit would try, and complain once more.
        os._exit(1)
