"""Window pages: layers with a window keep what it sees, and logits are those of a model that keeps everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import InvalidRequestError
from outrider.kv_cache import KVSequence
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import Scripted, build, forward_and_check, open_scripted, random_ids

PAGE_SIZE, WINDOW, CHUNK = 4, 8, 16
SLIDING = "sliding_attention"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 3, "sliding_window": WINDOW, "layer_types": [SLIDING, "full_attention", SLIDING]},
    ),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
}
MOST_HELD = (WINDOW + 64 + CHUNK) // PAGE_SIZE + 2
"""Window pages of one sequence: its window, what it can be rewound by, and a chunk."""


def open_runner(name: str, **options: Any) -> ModelRunner:
    architecture, config = MODELS[name]
    limits = replace(DEFAULT_LIMITS, max_batched_tokens=CHUNK, max_sequences=4)
    return ModelRunner.load(
        build(architecture, **config), dtype="float32", page_size=PAGE_SIZE, num_pages=200, graphs=limits,
        max_model_len=256, **options,
    )  # fmt: skip


def poison(runner: ModelRunner) -> None:
    """Make NaN of all that blank window pages hold: what the layers still read of them shows."""
    window = runner.sequences.window
    assert window is not None
    blank = [page for page in range(window.pool.num_pages) if window.pool.is_blank(page)]
    slots = [page * PAGE_SIZE + offset for page in blank for offset in range(PAGE_SIZE)]
    with torch.inference_mode():
        for group, tensor in zip(runner.kv_cache.layout.groups, runner.kv_cache.groups, strict=True):
            if group.spec.window is not None:
                tensor[:, slots] = float("nan")


def chunks(token_ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(token_ids), CHUNK):
        yield token_ids[start : start + CHUNK]


def num_held(runner: ModelRunner, sequence: KVSequence) -> int:
    return len(sequence.page_table) - sequence.window_start


def prefill(runner: ModelRunner, scripted: Scripted, token_ids: list[int]) -> None:
    for part in chunks(token_ids):
        poison(runner)
        forward_and_check(runner, (scripted, part, None))
        assert num_held(runner, scripted.sequence) <= MOST_HELD
    runner.sequences.commit(scripted.sequence, scripted.sequence.length)


@pytest.mark.parametrize("name", MODELS)
def test_pages_that_leave_the_window_are_given_back_and_logits_stay(name: str) -> None:
    runner = open_runner(name)
    window = runner.sequences.window
    assert window is not None
    assert window.pool.num_pages == 24 + 3 * 21  # a prompt's chunk, and three that decode beside it
    first = open_scripted(runner, first_folder(name), 250)
    prefill(runner, first, random_ids(190, 1))
    assert window.pool.num_used == num_held(runner, first.sequence) < runner.sequences.pool.num_used
    for length in range(190, 214, 4):  # drafts that are rejected in part
        poison(runner)
        forward_and_check(runner, (first, random_ids(6, length), None))
        runner.sequences.truncate(first.sequence, length + 4)
        runner.sequences.commit(first.sequence, length + 2)
    fork = Scripted(runner, first.folder, runner.sequences.fork(first.sequence, 250))
    poison(runner)
    forward_and_check(runner, (first, random_ids(3, 7), None), (fork, random_ids(5, 8), None))
    runner.sequences.truncate(fork.sequence, 170)  # as far as a rewind reaches
    forward_and_check(runner, (fork, random_ids(9, 9), None))


def test_a_prefix_is_found_where_its_window_pages_are() -> None:
    runner = open_runner("gemma3")
    text = random_ids(150, 3)
    first = open_scripted(runner, first_folder("gemma3"), 250)
    prefill(runner, first, text)
    runner.sequences.release(first.sequence)
    for length in (150, 90):  # the second ends where the window pages of the first were given back long ago
        poison(runner)
        again = open_scripted(runner, first.folder, 250)
        adopted = runner.sequences.adopt_prefix(again.sequence, text[:length])
        assert adopted == (length - 1) // PAGE_SIZE * PAGE_SIZE
        assert num_held(runner, again.sequence) < 24
        forward_and_check(runner, (again, [*text[adopted:length], *random_ids(5, length)], None))
        runner.sequences.release(again.sequence)


def test_a_prefix_without_its_window_pages_is_computed_again_and_found_then() -> None:
    runner = open_runner("gemma3")
    window, text = runner.sequences.window, random_ids(60, 5)
    assert window is not None
    first = open_scripted(runner, first_folder("gemma3"), 250)
    prefill(runner, first, text)
    runner.sequences.release(first.sequence)
    others = [runner.sequences.open(250) for _ in range(2)]
    for other in others:  # they take all window pages, and half of the others
        runner.sequences.extend(other, [1] * CHUNK)
    window.pool.allocate(window.pool.num_free)
    assert runner.sequences.adopt_prefix(runner.sequences.open(99), text) == 0
    assert runner.sequences.prefix_cache is not None
    assert len(runner.sequences.prefix_cache) == 15


def test_a_rewind_behind_the_window_is_refused() -> None:
    runner = open_runner("qwen2")
    first = open_scripted(runner, first_folder("qwen2"), 250)
    prefill(runner, first, random_ids(160, 2))
    with pytest.raises(InvalidRequestError, match="were given back"):
        runner.sequences.truncate(first.sequence, 60)
    runner.sequences.truncate(first.sequence, 0)
    forward_and_check(runner, (first, random_ids(12, 4), None))


def test_what_is_needed_and_free_is_counted_in_window_pages() -> None:
    runner = open_runner("qwen2")
    manager, sequence = runner.sequences, runner.sequences.open(250)
    assert (manager.num_free, manager.num_pages_free) == (87, 200)
    assert manager.pages_needed(sequence, 4) == 1
    assert manager.pages_needed(sequence, 128) == MOST_HELD  # 32 pages, of which no more window pages are held at once
    assert manager.pages_needed(sequence, 250) == 28  # as large a part of all as 63 pages
    manager.extend(sequence, [0] * 160)
    assert manager.num_free == min(87 - num_held(runner, sequence), (200 - 40) * 87 // 200)


def first_folder(name: str) -> Path:
    architecture, config = MODELS[name]
    return build(architecture, **config)
