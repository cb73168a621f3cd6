"""Flags shared by several commands, and the form of errors on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from outrider.errors import OutriderError

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
"""Value of a command's ``context_settings``."""


Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Show more output; -vv shows the logs of the services."
    ),
]

progress = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
"""Progress messages and errors, on standard error. Names such as ``module:X:`` are no emoji."""

output = Console(highlight=False, soft_wrap=True, emoji=False)
"""Results of commands, on standard output."""


SEED_HELP = (
    "Seed of the random numbers. It repeats the output with --acceptance-method coupled; with other rules for equal"
    " draft lengths only, and the default ones follow the load."
)
"""Help of ``--seed``."""


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn an ``OutriderError`` into one line on standard error and exit code 1."""
    try:
        yield
    except OutriderError as error:
        progress.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
