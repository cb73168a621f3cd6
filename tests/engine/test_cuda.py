"""The engine and the services on a GPU, against the CPU's answers. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.batch import ForwardRow
from outrider.engine.runner import ModelRunner
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def ragged_logits(folder: Path, device: str) -> torch.Tensor:
    """A prefill chunk beside a row that is scored, then a rollback and three more tokens."""
    runner = ModelRunner.load(folder, device=device, dtype="float32", page_size=4, num_pages=64)
    first, second = runner.sequences.open(40), runner.sequences.open(40)
    logits = [runner.forward([ForwardRow(first, list(range(3, 20)), 5), ForwardRow(second, [7, 8, 9], 3)])]
    runner.sequences.truncate(first, 11)
    logits.append(runner.forward([ForwardRow(first, [30, 31, 32], 3), ForwardRow(second, [33], 1)]))
    return torch.cat(logits).cpu()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_the_cpus(architecture: str) -> None:
    folder = cached_tiny_model(architecture, seed=1)
    torch.testing.assert_close(ragged_logits(folder, "cuda"), ragged_logits(folder, "cpu"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["rejection", "coupled", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_the_cpus(method: str, temperature: float) -> None:
    pair = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
    tokens = {}
    for device in ("cpu", "cuda"):
        on_device = {"device": device, "dtype": "float32"}
        async with run_stack(
            pair / "target",
            pair / "draft",
            wire=True,
            target_settings=on_device,
            draft_settings=on_device,
            draft_timeout_ms=60_000,
        ) as stack:
            result = await stack.generate(
                prompt="class Stack:\n",
                max_tokens=48,
                temperature=temperature,
                acceptance_method=method,
                seed=5,
                ignore_eos=True,
            )
        tokens[device] = result.token_ids
    assert tokens["cuda"] == tokens["cpu"]
