"""Work queued on a device: asynchronous copies to it, and waits for it.

A wait spins if the process has several processors, which is what CUDA does and has the least latency. If the process
keeps to a single processor (``num_pinned_cpus``), the threads that bring the next commands need it meanwhile, so
the wait polls with short sleeps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from outrider.timer_slack import POLL_INTERVAL_S, reduce_timer_slack
from outrider.types import IntArray


def mark_reached(device: torch.device) -> Callable[[], None]:
    """Function that waits until ``device`` has done the work queued on the current stream so far; no wait on a CPU."""
    return Mark(device).wait


class Mark:
    """Mark in the current stream of ``device``, reached when the work queued before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._reached = _record(device) if device.type == "cuda" else None

    def is_reached(self) -> bool:
        """True if the device has done it; a CPU always has."""
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


def to_device(numbers: Sequence[int] | IntArray, device: torch.device) -> torch.Tensor:
    """Copy ``numbers`` to the device as [N] int32, without waiting for the work that is queued on it."""
    host = torch.empty(len(numbers), dtype=torch.int32, pin_memory=device.type == "cuda")
    host.numpy()[:] = numbers
    return host.to(device, non_blocking=True)


def to_host(found: torch.Tensor) -> torch.Tensor:
    """Copy that is whole when the device reaches a later mark; the tensor itself on a CPU. Reading a tensor of the
    device instead would wait for all work that is queued on it.
    """
    if found.device.type == "cpu":
        return found
    return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
