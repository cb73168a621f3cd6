"""The way of a launch's numbers to its device, where that is a CPU; ``kernels/triton_cases`` has the kernel's."""

from __future__ import annotations

import numpy as np
import torch

from outrider.model_executor.input_buffer import PinnedInputBuffer


def test_what_was_put_is_taken_in_once() -> None:
    input_buffer = PinnedInputBuffer(6, torch.device("cpu"))
    numbers = np.array([3, 1, 4, 1], dtype=np.int32)
    input_buffer.put(numbers)
    numbers[:] = 9  # the caller's again
    assert input_buffer.numbers.tolist() == [0] * 6
    input_buffer.copy_inputs()
    assert input_buffer.numbers.tolist() == [3, 1, 4, 1, 0, 0]
    input_buffer.numbers.fill_(7)
    input_buffer.copy_inputs()
    assert input_buffer.numbers.tolist() == [7] * 6


def test_numbers_of_a_launch_that_failed_before_it_began_are_forgotten() -> None:
    input_buffer = PinnedInputBuffer(4, torch.device("cpu"))
    input_buffer.put(np.array([1, 2, 3], dtype=np.int32))
    input_buffer.put(np.array([5], dtype=np.int32))
    input_buffer.copy_inputs()
    assert input_buffer.numbers.tolist() == [5, 0, 0, 0]
