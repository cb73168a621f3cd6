"""A few of the random steps at every build; ``python -m tests.random_steps`` takes thousands."""

from __future__ import annotations

import pytest
import torch

from tests.random_steps.running import take_random_steps
from tests.support.tiny_models import cached_tiny_model


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_random_steps_leave_texts_and_pages_right(architecture: str) -> None:
    take_random_steps(cached_tiny_model(architecture), "cpu", 400, seed=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "num_steps"), [("llama", 10_000), ("mistral", 2_000)])
def test_random_steps_on_a_gpu(architecture: str, num_steps: int) -> None:
    take_random_steps(cached_tiny_model(architecture), "cuda", num_steps, seed=4)
