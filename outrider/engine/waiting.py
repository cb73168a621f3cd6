"""How an engine's thread waits for its device: it looks again and again, and gives way to whoever wants the processor.

CUDA's own way burns the processor without letting go. The threads that bring the next commands share it where a process
keeps to few, and would come a time slice late.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

# Before Python 3.12 this call keeps the interpreter to itself; a sleep of nothing gives both away.
_give_way: Callable[[], object] = os.sched_yield if sys.version_info >= (3, 12) else partial(time.sleep, 0)


def mark_reached(device: torch.device) -> Callable[[], None]:
    """What returns when ``device`` has done all that the current stream was given so far; at once on a CPU."""
    if device.type != "cuda":
        return _nothing
    reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
    reached.record(torch.cuda.current_stream(device))
    return partial(_wait, reached)


def _wait(reached: torch.cuda.Event) -> None:
    while not reached.query():  # type: ignore[no-untyped-call]
        _give_way()


def _nothing() -> None:
    """The CPU has done it."""
