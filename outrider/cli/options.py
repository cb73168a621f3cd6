"""Flags that several commands share, and what an error of ours looks like on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from outrider.errors import OutriderError

DEFAULT_ADDRESS = "127.0.0.1:50050"

Address = Annotated[str, typer.Option("--address", "-a", help="Where the coordinator is: host:port or unix:/path.")]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; -vv shows the services' logs.")]

progress = Console(stderr=True, highlight=False, soft_wrap=True)
"""What is on its way, for people; never part of a command's result."""

output = Console(highlight=False, soft_wrap=True)
"""A command's result."""


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """An ``OutriderError`` becomes one line on standard error and exit code 1."""
    try:
        yield
    except OutriderError as error:
        progress.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
