"""Greedy output through the whole stack equals transformers' own ``generate``, token by token, in float32."""

from __future__ import annotations

import asyncio
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.waiting import all_free
from tests.model_executor.test_parity import MODELS
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model, load_reference

NUM_TOKEN_IDS = 257  # 256 bytes and an end
NUM_ROWS = 272  # of the tiny models' heads: the rest is padding, never proposed and never emitted
CHUNK = 24  # tokens in a forward of these stacks: prompts of several chunks are cheap
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi4-mini"]


_loaded = lru_cache(maxsize=2)(load_reference)


def reference(folder: Path, prompt: list[int], max_tokens: int, *, padding: range = range(0)) -> list[int]:
    model = _loaded(folder)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(padding) or None,
        )
    return [int(token) for token in output[0, len(prompt) :]]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of one token to several prefill chunks."""
    source = random.Random(seed)
    lengths = [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
    lengths += [source.randint(1, 2 * CHUNK) for _ in range(count)]
    return [[source.randrange(NUM_TOKEN_IDS) for _ in range(length)] for length in lengths[:count]]


async def check_batch(stack: Stack, folder: Path, count: int, seed: int) -> None:
    """A mixed batch, every request with a draft length of its own."""
    batch = prompts(count, seed)
    budgets = [5 + (index * 7) % 24 for index in range(count)]
    results = await asyncio.gather(
        *(
            stack.generate(
                prompt_token_ids=prompt,
                max_tokens=budget,
                temperature=0,
                ignore_eos=True,
                num_speculative_tokens=(index * 5) % 9,
                acceptance_method=["rejection", "coupled", "typical"][index % 3],
            )
            for index, (prompt, budget) in enumerate(zip(batch, budgets, strict=True))
        )
    )
    for prompt, budget, result in zip(batch, budgets, results, strict=True):
        assert list(result.token_ids) == reference(folder, prompt, budget, padding=range(NUM_TOKEN_IDS, NUM_ROWS))
        assert result.finish_reason == "length"


def stack_of(folder: Path, draft: Path | str | None, *, wire: bool) -> Any:
    small = {"max_batched_tokens": CHUNK, "page_size": 4}
    return run_stack(
        folder,
        draft,
        wire=wire,
        target_settings=small,
        draft_settings=small if isinstance(draft, Path) else {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        draft_timeout_ms=60_000,
    )


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        *((name, kind) for name in ARCHITECTURES for kind in ("equal", "unrelated")),
        *(("llama", kind) for kind in ("missing", "ngram", "suffix")),
    ],
)
async def test_a_mixed_batch_equals_transformers(architecture: str, kind: str) -> None:
    model_type, config = MODELS[architecture]
    folder = cached_tiny_model(model_type, seed=1, **config)
    draft: Path | str | None = {
        "equal": folder,
        "unrelated": cached_tiny_model("llama", seed=9),
        "missing": None,
        "ngram": "ngram",
        "suffix": "suffix",
    }[kind]
    async with stack_of(folder, draft, wire=False) as stack:
        for count in (1, 7):
            await check_batch(stack, folder, count, seed=count)
        await all_free(stack)


@pytest.mark.parametrize("kind", ["equal", "unrelated"])
async def test_a_mixed_batch_of_sixteen_equals_transformers_over_grpc(kind: str) -> None:
    folder = cached_tiny_model("qwen3", seed=1)
    draft = folder if kind == "equal" else cached_tiny_model("llama", seed=9)
    async with stack_of(folder, draft, wire=True) as stack:
        await check_batch(stack, folder, 16, seed=3)


async def test_a_draft_that_attends_to_a_window_changes_no_token() -> None:
    """Draft that is the target itself, which would be accepted whole if it saw everything."""
    folder, prompt = cached_tiny_model("llama", seed=1), prompts(5, 3)[-1]
    window = {"attention_window": 6, "attention_sinks": 2, "page_size": 4}
    async with run_stack(folder, folder, wire=False, draft_settings=window) as stack:
        assert stack.draft is not None
        assert stack.draft.runner is not None
        layout = stack.draft.runner.kv_cache.layout
        assert (layout.windows, layout.sinks) == ((6,), (2,))
        result = await stack.generate(prompt_token_ids=prompt, max_tokens=30, temperature=0, ignore_eos=True)
        assert list(result.token_ids) == reference(folder, prompt, 30, padding=range(NUM_TOKEN_IDS, NUM_ROWS))
        assert result.speculation.num_accepted_tokens < result.speculation.num_draft_tokens


@pytest.mark.parametrize("method", ["greedy", "coupled"])
async def test_a_draft_that_computes_the_end_of_a_prompt_changes_no_token(method: str) -> None:
    """Draft that leaves out the first 512 of 600 tokens, and is still accepted where it sees what the target sees."""
    folder = cached_tiny_model("llama", seed=1, max_position_embeddings=1024)
    prompt = [token % NUM_TOKEN_IDS for token in range(5, 605)]
    options: dict[str, Any] = {"temperature": 0} if method == "greedy" else {"acceptance_method": "coupled", "seed": 3}
    window = {"attention_window": 40, "attention_sinks": 2, "page_size": 4}
    async with run_stack(folder, folder, wire=False, draft_settings=window) as stack:
        assert stack.draft is not None and stack.draft.runner is not None
        with_draft, alone = [
            await stack.generate(
                prompt_token_ids=prompt, max_tokens=30, ignore_eos=True, num_speculative_tokens=length, **options
            )
            for length in (4, 0)
        ]
        pool = stack.draft.runner.sequences.pool
        assert pool.num_pages - pool.num_free == 0
    assert with_draft.token_ids == alone.token_ids
    assert with_draft.speculation.num_accepted_tokens > 0
    if method == "greedy":
        padding = range(NUM_TOKEN_IDS, NUM_ROWS)
        assert list(alone.token_ids) == reference(folder, prompt, 30, padding=padding)


async def test_an_equal_draft_is_accepted_whole() -> None:
    folder = cached_tiny_model("llama", seed=1)
    async with stack_of(folder, folder, wire=False) as stack:
        result = await stack.generate(
            prompt_token_ids=[5, 6, 7], max_tokens=26, temperature=0, ignore_eos=True, num_speculative_tokens=4
        )
    # The prefill gives one token, then five steps of four drafts and a bonus each.
    assert result.speculation.num_steps == 6
    assert result.speculation.acceptance_histogram == (0, 0, 0, 0, 5)


@pytest.mark.parametrize("text", ["def ", "class Stack:\n    def push(self, item):\n", "import os\n"])
async def test_the_embedded_pair_equals_transformers(text: str) -> None:
    pair = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
    async with run_stack(pair / "target", pair / "draft", wire=True, draft_timeout_ms=60_000) as stack:
        results = [
            await stack.generate(
                prompt=text, max_tokens=32, temperature=0, ignore_eos=True, num_speculative_tokens=draft_length
            )
            for draft_length in (0, 4)
        ]
    from tokenizers import Tokenizer

    prompt = Tokenizer.from_file(str(pair / "target" / "tokenizer.json")).encode(text).ids
    expected = reference(pair / "target", prompt, 32)
    assert [list(result.token_ids) for result in results] == [expected, expected]
