"""How an engine's thread waits for its device.

With several processors it spins, which is what CUDA does: nothing is noticed sooner. Where a process keeps to a single
one (``num_awake_processors``), the threads that bring the next commands need it meanwhile, so it sleeps and looks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

_LOOK_S = 20e-6
_punctual = threading.local()


def mark_reached(device: torch.device) -> Callable[[], None]:
    """What returns when ``device`` has done all that the current stream was given so far; at once on a CPU."""
    if device.type != "cuda":
        return _nothing
    reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
    reached.record(torch.cuda.current_stream(device))
    return partial(wait_for, reached)


def wait_for(reached: torch.cuda.Event) -> None:
    """Return when the device has reached it."""
    if not _has_one_processor():
        reached.synchronize()
        return
    _be_punctual()
    while not reached.query():  # type: ignore[no-untyped-call]
        time.sleep(_LOOK_S)


def _has_one_processor() -> bool:
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1


def _be_punctual() -> None:
    """Linux lets a thread sleep 50 us longer than it asked for, unless it says that this matters."""
    if not getattr(_punctual, "is_set", False):
        _punctual.is_set = True
        with contextlib.suppress(OSError):
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1000", encoding="ascii")


def _nothing() -> None:
    """The CPU has done it."""
