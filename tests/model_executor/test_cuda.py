"""The engine and the services on a GPU, against the CPU's answers. Skipped where there is none."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch

from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits, forward_shapes
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
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


def random_steps(runner: ModelRunner, num_steps: int) -> list[torch.Tensor]:
    """Growing, rolling back, forking and ending sequences, some at once; the logits of every step."""
    choose, table = random.Random(3), runner.sequences
    sequences = [table.open(60) for _ in range(5)]
    found = []
    for _ in range(num_steps):
        place = choose.randrange(len(sequences))
        if choose.random() < 0.2:
            table.release(sequences[place])
            parent = sequences[place - 1]
            sequences[place] = table.fork(parent, 60) if choose.random() < 0.5 else table.open(60)
        rows = []
        for sequence in choose.sample(sequences, choose.randint(1, 5)):
            count = choose.choice((1, 1, 1, 2, 4, 5, 8, 19))
            if sequence.length + count > 60:
                table.truncate(sequence, choose.randint(0, 60 - count))
            tokens = [choose.randrange(256) for _ in range(count)]
            rows.append(ForwardRow(sequence, tokens, choose.randint(0, count)))
        found.append(runner.forward(rows).cpu())
        table.check_integrity()
    return found


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_captured_forwards_follow_the_cpu_over_many_steps(architecture: str) -> None:
    folder = cached_tiny_model(architecture, seed=1)
    found = {}
    for device in ("cpu", "cuda"):
        runner = ModelRunner.load(folder, device=device, dtype="float32", page_size=4, num_pages=200)
        runner.warm_up()
        with torch.inference_mode():
            runner.kv_cache.fill_(float("nan"))  # what nobody wrote, or something that fills up a shape, would show
        found[device] = random_steps(runner, 300)
    for on_gpu, on_cpu in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=2e-4, rtol=0)


def test_warming_up_says_how_far_it_is_and_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    runner = ModelRunner.load(cached_tiny_model("llama", seed=1), device="cuda", page_size=4, num_pages=64)
    steps: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, logger="outrider.model_executor"):
        runner.warm_up(lambda done, total: steps.append((done, total)))
    total = len(forward_shapes(DEFAULT_LIMITS, has_chunks=runner.dtype.itemsize == 2))
    assert steps == [(done, total) for done in range(1, total + 1)]
    assert f"captured {total} forwards" in caplog.text
    assert "GiB free" in caplog.text
    assert (runner.num_forwards, runner.sequences.pool.num_used) == (0, 0)


def test_pages_leave_room_for_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider.model_executor"):
        runner = ModelRunner.load(cached_tiny_model("llama", seed=1), device="cuda", page_size=4)
        runner.warm_up()
    said = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in said] == ["KV", "captured", "CUDA"]
    assert runner.sequences.pool.num_free == 256 * 256 // 4  # enough memory for the default number of sequences
    sequence = runner.sequences.open(256)
    assert runner.forward([ForwardRow(sequence, [1, 2, 3], 3)]).isfinite().all()


def test_without_memory_for_graphs_there_are_none() -> None:
    limits = GraphLimits(memory_bytes=0)
    runner = ModelRunner.load(
        cached_tiny_model("llama", seed=1), device="cuda", page_size=4, num_pages=64, graphs=limits
    )
    runner.warm_up()
    sequence = runner.sequences.open(20)
    assert runner.forward([ForwardRow(sequence, [1, 2, 3], 3)]).isfinite().all()


def test_logits_outlive_the_next_forward() -> None:
    runner = ModelRunner.load(cached_tiny_model("llama", seed=1), device="cuda", page_size=4, num_pages=64)
    runner.warm_up()
    sequence = runner.sequences.open(20)
    first = runner.forward([ForwardRow(sequence, [1, 2, 3], 3)])
    kept = first.clone()
    runner.forward([ForwardRow(sequence, [4, 5, 6], 3)])
    torch.testing.assert_close(first, kept, atol=0, rtol=0)


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
