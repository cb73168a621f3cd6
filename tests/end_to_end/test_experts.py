"""Models with experts through the whole stack: greedy tokens are transformers', coupled ones those without a draft, in
mixed batches, chunks, with prefix caching and under preemption. Float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_greedy import CHUNK, NUM_ROWS, NUM_TOKEN_IDS, check_batch, prompts, reference, stack_of
from tests.end_to_end.test_preemption import value
from tests.end_to_end.waiting import all_free
from tests.support.stack import run_stack
from tests.support.tiny_models import cached_tiny_model

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kind", ["equal", "unrelated", "missing"])
async def test_a_mixed_batch_equals_transformers(architecture: str, kind: str) -> None:
    """Every draft length from 0 to 8, alone and together; prompts of several chunks."""
    folder = cached_tiny_model(architecture, seed=1)
    draft = {"equal": folder, "unrelated": cached_tiny_model("llama", seed=9), "missing": None}[kind]
    async with stack_of(folder, draft, wire=False) as stack:
        for count in (1, 9):
            await check_batch(stack, folder, count, seed=count)
        await all_free(stack)


async def test_a_draft_with_experts_changes_no_token() -> None:
    folder, draft = cached_tiny_model("llama", seed=1), cached_tiny_model("mixtral", seed=2)
    async with stack_of(folder, draft, wire=True) as stack:
        await check_batch(stack, folder, 5, seed=4)


@pytest.mark.parametrize("architecture", FAMILIES)
async def test_preempted_requests_equal_transformers(architecture: str) -> None:
    await check_preempted(cached_tiny_model(architecture, seed=1))


@pytest.mark.parametrize("architecture", FAMILIES)
async def test_coupled_tokens_are_those_without_a_draft(architecture: str) -> None:
    await check_coupled(cached_tiny_model(architecture, seed=1), prompts(6, 7))


async def check_preempted(folder: Path) -> None:
    """Greedy tokens of a model with a draft of its own are those of transformers, though requests are preempted."""
    texts = [prompt + [1] * 30 for prompt in prompts(6, 5)]
    small = {"max_batched_tokens": CHUNK, "page_size": 4, "num_pages": 60}
    async with run_stack(
        folder, folder, wire=False, target_settings=small, draft_settings=small, draft_timeout_ms=60_000
    ) as stack:
        results = await asyncio.gather(
            *(
                stack.generate(prompt_token_ids=text, max_tokens=30, temperature=0, ignore_eos=True, **k_of(index))
                for index, text in enumerate(texts)
            )
        )
        assert value(stack.target, "outrider_sessions_preempted_total") > 0
    for text, result in zip(texts, results, strict=True):
        assert list(result.token_ids) == reference(folder, text, 30, padding=range(NUM_TOKEN_IDS, NUM_ROWS))


async def check_coupled(folder: Path, texts: Sequence[list[int]]) -> None:
    """Coupled tokens with drafts of every length, with and without prefix caching, are those without a draft. Texts are
    sent twice.
    """
    found = []
    for draft, caches in ((None, False), (folder, True), (cached_tiny_model("llama", seed=9), False)):
        settings = {"page_size": 4, "max_batched_tokens": CHUNK, "prefix_caching": caches}
        async with run_stack(
            folder, draft, wire=False, target_settings=settings, draft_settings=settings if draft else None,
            acceptance_method="coupled", draft_timeout_ms=60_000,
        ) as stack:  # fmt: skip
            results = []
            for _ in range(2):
                results += await asyncio.gather(
                    *(
                        stack.generate(prompt_token_ids=text, max_tokens=24, seed=index, ignore_eos=True, **k_of(index))
                        for index, text in enumerate(texts)
                    )
                )
            found.append([result.token_ids for result in results])
            accepted = sum(result.speculation.num_accepted_tokens for result in results)
            assert (accepted > 0) >= (draft == folder)
            assert (value(stack.target, "outrider_prefix_cache_hits_total") > 0) == caches
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert found[0][: len(texts)] == found[0][len(texts) :]


def k_of(index: int) -> dict[str, Any]:
    return {"num_speculative_tokens": (3 * index) % 9}
