"""Pinned input buffer: a launch's numbers are put into pinned memory of the host, and the launch itself copies them.

A launch that begins with ``copy_inputs`` needs no copy before it, so that host and device meet once a launch. The
buffer is filled again when the launch before has copied it.
"""

from __future__ import annotations

import functools

import torch

from outrider.kernels.copy_inputs import copy_inputs
from outrider.kernels.device_stream import wait_until
from outrider.model_executor.device_inputs import IntArray


class PinnedInputBuffer:
    """Up to ``size`` numbers a launch; for one thread, on the current stream."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.numbers = torch.zeros(size, dtype=torch.int32, device=device)
        """[size] on the device: what was copied last comes first."""
        self._pinned = torch.zeros(1 + size, dtype=torch.int32, pin_memory=device.type == "cuda")

    def put(self, numbers: IntArray) -> None:
        """Put ``numbers`` [any] for the next launch that copies them; they may change afterwards."""
        words = self._words
        if words[0] and self.numbers.is_cuda:  # the launch before has not copied them
            stream = torch.cuda.current_stream(self.numbers.device)
            wait_until(lambda: not words[0] or stream.query())
        words[1 : 1 + len(numbers)] = numbers
        words[0] = len(numbers)

    def replace_first(self, numbers: torch.Tensor) -> None:
        """The first of those that were just put become ``numbers`` [n] int32, when the device has come to know them."""
        self._pinned[1 : 1 + len(numbers)].copy_(numbers, non_blocking=True)

    def copy_inputs(self) -> None:
        """Copy what was put to ``numbers``, the first thing that a launch does; without anything put they stay."""
        copy_inputs(self._pinned, self.numbers)

    @functools.cached_property
    def _words(self) -> IntArray:
        return self._pinned.numpy()
