"""The way of a launch's numbers to its device, where that is a CPU; ``kernels/triton_cases`` has the kernel's."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.inlet import Inlet


def test_what_was_put_is_taken_in_once() -> None:
    inlet = Inlet(6, torch.device("cpu"))
    numbers = np.array([3, 1, 4, 1], dtype=np.int32)
    inlet.put(numbers)
    numbers[:] = 9  # the caller's again
    assert inlet.numbers.tolist() == [0] * 6
    inlet.take_in()
    assert inlet.numbers.tolist() == [3, 1, 4, 1, 0, 0]
    inlet.numbers.fill_(7)
    inlet.take_in()
    assert inlet.numbers.tolist() == [7] * 6


def test_numbers_of_a_launch_that_failed_before_it_began_are_forgotten() -> None:
    inlet = Inlet(4, torch.device("cpu"))
    inlet.put(np.array([1, 2, 3], dtype=np.int32))
    inlet.put(np.array([5], dtype=np.int32))
    inlet.take_in()
    assert inlet.numbers.tolist() == [5, 0, 0, 0]
