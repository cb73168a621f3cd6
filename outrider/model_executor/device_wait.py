"""How an engine's thread waits for its device.

With several processors it spins, which is what CUDA does: nothing is noticed sooner. Where a process keeps to a single
one (``num_awake_processors``), the threads that bring the next commands need it meanwhile, so it sleeps and looks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from outrider.serving.timer_slack import POLL_INTERVAL_S, reduce_timer_slack


def mark_reached(device: torch.device) -> Callable[[], None]:
    """What returns when ``device`` has done all that the current stream was given so far; at once on a CPU."""
    return Mark(device).wait


class Mark:
    """All that the current stream of ``device`` was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._reached = _record(device) if device.type == "cuda" else None

    def is_reached(self) -> bool:
        """Whether the device has done it; a CPU always has."""
        return self._reached is None or bool(self._reached.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when the device has done it."""
        if self._reached is not None:
            wait_for(self._reached)


def wait_for(reached: torch.cuda.Event) -> None:
    """Return when the device has reached it."""
    if _has_one_processor():
        wait_until(reached.query)
    else:
        reached.synchronize()


def wait_until(is_done: Callable[[], bool]) -> None:
    """Return soon after ``is_done`` has become true, leaving the processor to others meanwhile."""
    reduce_timer_slack()
    while not is_done():
        time.sleep(POLL_INTERVAL_S)


def _has_one_processor() -> bool:
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1


def _record(device: torch.device) -> torch.cuda.Event:
    reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
    reached.record(torch.cuda.current_stream(device))
    return reached
