"""Launches recorded once and repeated: CUDA graphs on a GPU; elsewhere, where there are none, launches made anew.

Owns the streams, the memory and the mode of capture. Refuses to know what is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

_PREPARING_RUNS = 2


class Capturing(Protocol):
    """Records launches that read and write the same tensors each time, and of which no two run at once."""

    def prepare(self, launch: Callable[[], object]) -> None:
        """Launch until everything that takes time or memory once is done."""
        ...

    def capture(self, launch: Callable[[], T]) -> Callable[[], T]:
        """What repeats a launch that was prepared, and gives what it gave; valid until any other is repeated."""
        ...

    def describe_memory(self) -> str:
        """What all that was captured takes, in words."""
        ...


def open_capturing(device: torch.device) -> Capturing:
    """The fastest form on this device."""
    return GraphPool(device) if device.type == "cuda" else NoGraphs()


class GraphPool:
    """CUDA graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_before = _free_bytes(device)
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: what libraries keep for each stream they then keep once.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def prepare(self, launch: Callable[[], object]) -> None:
        """Launch until everything that takes time or memory once is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_PREPARING_RUNS):
                launch()
        torch.cuda.synchronize(self._device)

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
        """Of the device."""
        free = _free_bytes(self._device)
        return f"they take {(self._free_before - free) / 2**20:.0f} MiB and leave {free / 2**30:.1f} GiB free"


class NoGraphs:
    """The launches themselves, over the same tensors; what can be captured can be tested so on a CPU."""

    def prepare(self, launch: Callable[[], object]) -> None:
        """Nothing is gained by it."""

    def capture(self, launch: Callable[[], T]) -> Callable[[], T]:
        """The launch."""
        return launch

    def describe_memory(self) -> str:
        """Nothing is kept."""
        return "they are launched anew each time"


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)
