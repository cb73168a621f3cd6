"""Launches recorded once and repeated: CUDA graphs on a GPU; elsewhere, where there are none, launches made anew.

Owns the streams, the memory and the mode of capture.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

Least = Callable[[int], int]
"""The least of what the ranks of a model say; every rank calls it at the same point."""

_DRIVER_BYTES = 3 << 20
"""Approximate memory of a graph besides its buffers."""
_USUAL_CAPTURE_S = 0.05
"""Usual time of a capture whose kernels are compiled: 139 of an 8B model took 6.1 s."""


class GraphRecorder(Protocol):
    """Records launches that read and write the same tensors each time, and of which no two run at once."""

    def prepare(self, launch: Callable[[], object]) -> int:
        """Launch, so that everything that takes time or memory once is done; the most bytes of the device's memory that
        it had at once.
        """
        ...

    def capture(self, launch: Callable[[], T]) -> Callable[[], T]:
        """Function that replays a prepared launch and returns its outputs, which are valid until the next replay."""
        ...

    def describe_memory(self) -> str:
        """Memory of all captured graphs, in words."""
        ...


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """Limits of all graphs of a model together; None is none."""

    memory_bytes: int | None = None
    """Memory of the buffers, which graphs share, and of what the driver keeps of each."""
    seconds: float | None = None
    """Time for the capture, about: kernels that are still to be compiled are not foreseen."""


class CaptureBound:
    """Bound of the capture: ``num_left`` graphs, captured largest first, stay within ``limits``.

    A graph that does not fit is left out, so that smaller ones, which gain more, are captured.

    Ranks that share a model leave out the same graphs, since launches have collectives: they count by the lowest limit
    and the largest buffers of any rank, and have time while all have, which ``least`` finds. Without it there is one
    rank.
    """

    def __init__(
        self,
        limits: CaptureLimits,
        num_left: int,
        least: Least | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_graphs = 0
        """Captured."""
        limit = limits.memory_bytes
        self._least, self._seconds, self._clock = least, limits.seconds, clock
        self._limit = limit if limit is None or least is None else least(limit)
        self._num_left = num_left
        self._most_bytes = 0
        self._began, self._quickest = clock(), _USUAL_CAPTURE_S

    def has_time(self) -> bool:
        """True if there is time for all that are left; every rank calls it at the same point."""
        if self._seconds is None:
            return True
        fits = self._clock() - self._began + self._num_left * self._quickest <= self._seconds
        return fits if self._least is None else bool(self._least(int(fits)))

    def admits(self, num_bytes: int = 0) -> bool:
        """True if a graph with this many bytes of buffers fits, and all others that are left with no more."""
        num_graphs = self.num_graphs + self._num_left
        return self._limit is None or max(self._most_bytes, num_bytes) + num_graphs * _DRIVER_BYTES <= self._limit

    def most_of_ranks(self, num_bytes: int) -> int:
        """The most bytes that any rank measured; every rank calls it at the same point."""
        return num_bytes if self._least is None or self._limit is None else -self._least(-num_bytes)

    def count(self, num_bytes: int, seconds: float) -> None:
        """The next was captured, in this many seconds."""
        self.num_graphs += 1
        self._most_bytes = max(self._most_bytes, num_bytes)
        self._quickest = min(self._quickest, seconds)
        self._num_left -= 1

    def leave_out(self) -> None:
        """The next was not."""
        self._num_left -= 1

    def capture(self, recorder: GraphRecorder, launch: Callable[[], T]) -> Callable[[], T] | None:
        """Function that replays a launch; None, on every rank alike, if its graph would exceed a limit."""
        began = self._clock()
        num_bytes = 0
        if fits := self.has_time() and self.admits():
            num_bytes = self.most_of_ranks(recorder.prepare(launch))
            fits = self.admits(num_bytes)
        if not fits:
            self.leave_out()
            return None
        captured = recorder.capture(launch)
        self.count(num_bytes, self._clock() - began)
        return captured


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """No garbage is collected meanwhile, and none is there at the beginning: a graph of an earlier model that is freed
    while another is captured would invalidate that.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def open_recorder(device: torch.device) -> GraphRecorder:
    """The fastest form on this device."""
    return GraphPool(device) if device.type == "cuda" else NoGraphs()


class GraphPool:
    """CUDA graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.empty_cache()  # as each capture does: what is kept for reuse counts as free, before as after
        self._free_before = _free_bytes(device)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: what libraries keep for each stream they then keep once.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def prepare(self, launch: Callable[[], object]) -> int:
        """Launch once; the most bytes that tensors had at once, besides those that were there."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - before)

    def capture(self, launch: Callable[[], T]) -> Callable[[], T]:
        """A graph of it."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on using devices meanwhile: those of another model in this process, and those that watch
        # over the other ranks.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            given = launch()

        def replay() -> T:
            graph.replay()
            return given

        return replay

    def describe_memory(self) -> str:
        """Memory use of the graphs on the device, as a phrase."""
        free = _free_bytes(self._device)
        return f"they take {(self._free_before - free) / 2**20:.0f} MiB and leave {free / 2**30:.1f} GiB free"


class NoGraphs:
    """The launches themselves, over the same tensors; what can be captured can be tested so on a CPU."""

    def prepare(self, launch: Callable[[], object]) -> int:
        """Nothing is gained by it."""
        return 0

    def capture(self, launch: Callable[[], T]) -> Callable[[], T]:
        """The launch."""
        return launch

    def describe_memory(self) -> str:
        """Nothing is kept."""
        return "they are launched anew each time"


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)
