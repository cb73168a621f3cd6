"""The way of a launch's numbers to its device: left in a box on the host, taken in by the launch itself.

A launch that begins with ``take_in`` needs no copy before it, so that host and device meet once a launch. Owns the box
and when it may be filled again. Refuses to know what the numbers mean.
"""

from __future__ import annotations

import functools

import torch

from outrider.kernels import copy_inputs as input_buffer
from outrider.model_executor.device_inputs import IntArray
from outrider.model_executor.device_wait import wait_until


class PinnedInputBuffer:
    """Up to ``size`` numbers a launch; for one thread, on the current stream."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.numbers = torch.zeros(size, dtype=torch.int32, device=device)
        """[size] on the device: what was taken in last comes first."""
        self._box = torch.zeros(1 + size, dtype=torch.int32, pin_memory=device.type == "cuda")

    def put(self, numbers: IntArray) -> None:
        """Leave ``numbers`` [any] for the next launch that takes them in; they may change afterwards."""
        words = self._words
        if words[0] and self.numbers.is_cuda:  # a launch before has not come to them
            stream = torch.cuda.current_stream(self.numbers.device)
            wait_until(lambda: not words[0] or stream.query())
        words[1 : 1 + len(numbers)] = numbers
        words[0] = len(numbers)

    def replace_first(self, numbers: torch.Tensor) -> None:
        """The first of those that were just put become ``numbers`` [n] int32, when the device has come to know them."""
        self._box[1 : 1 + len(numbers)].copy_(numbers, non_blocking=True)

    def take_in(self) -> None:
        """The first thing that a launch does: ``numbers`` become what was put; without that they stay."""
        input_buffer.take_in(self._box, self.numbers)

    @functools.cached_property
    def _words(self) -> IntArray:
        return self._box.numpy()
