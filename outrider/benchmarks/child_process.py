"""Child processes of benchmarks, which print the address at which they listen and end with their standard input."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

from outrider.errors import UnavailableError

_START_TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def child_process(*arguments: str, is_quiet: bool = False) -> AsyncIterator[tuple[str, Process]]:
    """``python ARGUMENTS...`` while the context lasts: the line that it prints first, its address, and the process.

    ``is_quiet``: what it writes to standard error is dropped. ``UnavailableError`` for one that ends before its line,
    ``TimeoutError`` for one that takes a minute.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL if is_quiet else None
    )
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise UnavailableError("a process has no pipes")
    try:
        line = await asyncio.wait_for(stdout.readline(), _START_TIMEOUT_S)
        if not line:
            raise UnavailableError(f"the process of {' '.join(arguments)} ended at once")
        yield line.decode().strip(), process
    finally:
        stdin.close()
        await process.wait()
