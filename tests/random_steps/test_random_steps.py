"""Random steps of a runner and of services, a few at every build; ``python -m tests.random_steps`` takes thousands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.model_runner import ModelRunner
from tests.random_steps.of_runner import RunnerSteps
from tests.random_steps.of_services import DraftSteps, TargetSteps
from tests.support.tiny_models import cached_tiny_model

NUM_TOKEN_IDS = 257


def load(folder: Path, device: str, *, dtype: str = "float32", max_model_len: int = 128) -> ModelRunner:
    """A tiny model with fewer pages than the steps would like, warmed up (on a GPU: captured) as a service's is."""
    runner = ModelRunner.load(
        folder,
        device=device,
        dtype=dtype,
        page_size=4,
        num_pages=240,
        max_model_len=max_model_len,
        drafting=DraftingRules(),
    )
    runner.warm_up()
    return runner


def take_random_steps(
    folder: Path, device: str, num_steps: int, *, seed: int = 0, say: Callable[[str], None] = lambda text: None
) -> None:
    """Random steps of each kind."""
    runner = load(folder, device)
    forwards = RunnerSteps(runner, seed)
    forwards.run(num_steps)
    assert forwards.num_checks, "no text was computed anew: take more steps"
    say(f"runner: {num_steps} steps, {forwards.num_checks} texts computed anew")
    for make in (TargetSteps, DraftSteps):
        steps = make(runner, seed + 1, num_token_ids=NUM_TOKEN_IDS)
        steps.run(num_steps)
        assert steps.num_answers, "nothing was answered: take more steps"
        assert steps.num_checks, "no answer could be checked: take more steps"
        assert steps.num_foreseen is None or min(steps.num_foreseen) > 0
        say(f"{make.__name__}: {num_steps} steps, {steps.num_answers} answers, {steps.num_checks} checked")


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_random_steps_leave_texts_and_pages_right(architecture: str) -> None:
    take_random_steps(cached_tiny_model(architecture), "cpu", 400, seed=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("architecture", "num_steps"), [("llama", 10_000), ("mistral", 2_000)])
def test_random_steps_on_a_gpu(architecture: str, num_steps: int) -> None:
    take_random_steps(cached_tiny_model(architecture), "cuda", num_steps, seed=4)
