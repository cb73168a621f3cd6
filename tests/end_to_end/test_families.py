"""Families of models through the whole stack: coupled tokens do not depend on the draft, draft lengths, prefix caching,
chunks and preemption; in FP8 made at load too. Float32. ``test_matrix`` loses services beside that.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.generation import GenerationResult
from tests.end_to_end.test_greedy import CHUNK, NUM_ROWS, NUM_TOKEN_IDS, check_batch, prompts, reference
from tests.end_to_end.test_greedy import stack_of as greedy_stack_of
from tests.end_to_end.test_preemption import value
from tests.end_to_end.waiting import all_free
from tests.model_executor.test_parity import MODELS
from tests.support.fallback_models import build_fallback
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

FAMILIES = ["gemma2", "gemma4", "gemma4-experts", "glm4", "granite", "mistral-window", "olmo3", "phi3"]
"""Families that the quick part of ``test_matrix`` does not play, without those that have the same layers."""
THROUGH_TRANSFORMERS = ["smollm3", "cohere2"]
IN_FP8 = ["gemma3", "qwen3-moe", "smollm3"]
"""Families with different linear layers: of their own, of experts, and of transformers."""
PROMPTS = [prompt + [1] * 20 for prompt in prompts(6, 5)]
MAX_TOKENS = 24


def folder_of(name: str) -> Path:
    if name in THROUGH_TRANSFORMERS:
        return build_fallback(name)
    model_type, config = MODELS[name]
    return cached_tiny_model(model_type, seed=1, **config)


def stack_of(folder: Path, draft: Path | None, *, wire: bool = False, **settings: Any) -> Any:
    common = {"page_size": 4, "max_batched_tokens": CHUNK, **settings}
    return run_stack(
        folder, draft, wire=wire, target_settings=common, draft_settings=common if draft else None,
        acceptance_method="coupled", draft_timeout_ms=60_000,
    )  # fmt: skip


async def outputs(stack: Stack) -> list[GenerationResult]:
    """All prompts at once, with draft lengths from 1 to 8."""
    return await asyncio.gather(
        *(
            stack.generate(
                prompt_token_ids=prompt, max_tokens=MAX_TOKENS, seed=index, ignore_eos=True,
                num_speculative_tokens=1 + (3 * index) % 8,
            )
            for index, prompt in enumerate(PROMPTS)
        )
    )  # fmt: skip


def tokens(results: list[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [*((name, "none") for name in (*FAMILIES, *THROUGH_TRANSFORMERS)), *((name, "fp8") for name in IN_FP8)],
)
async def test_coupled_tokens_do_not_depend_on_the_draft(name: str, quantization: str) -> None:
    folder = folder_of(name)
    async with stack_of(folder, None, prefix_caching=False, quantization=quantization) as stack:
        alone = tokens(await outputs(stack))
    async with stack_of(folder, folder, num_pages=60, quantization=quantization) as stack:
        results = [await outputs(stack) for _ in range(2)]
        assert value(stack.target, "outrider_sessions_preempted_total") > 0
        assert sum(result.speculation.num_accepted_tokens for result in results[0]) > 0
        await all_free(stack)
    assert [tokens(one) for one in results] == [alone, alone]


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
async def test_texts_that_leave_the_window_are_those_of_transformers(name: str) -> None:
    """Window pages are given back between chunks, found again, and too few for all sessions at once."""
    folder = folder_of(name)
    texts = [(prompts(1, 7)[0] * 40)[: 110 + 9 * number] for number in range(4)]
    async with stack_of(folder, folder, num_pages=150) as stack:
        window = stack.target.runner.sequences.window
        assert window is not None
        for _ in range(2):
            calls = [
                stack.generate(
                    prompt_token_ids=text, max_tokens=50, temperature=0, ignore_eos=True, num_speculative_tokens=length
                )
                for length, text in zip((1, 3, 5, 8), texts, strict=True)
            ]
            for text, result in zip(texts, await asyncio.gather(*calls), strict=True):
                expected = reference(folder, text, 50, padding=range(NUM_TOKEN_IDS, NUM_ROWS))
                assert list(result.token_ids) == expected
        await all_free(stack)
        assert window.pool.num_used == 0


async def test_a_text_alone_may_fill_the_smallest_cache_with_window_pages() -> None:
    """Two chunks of its prompt take more window pages than there are, and its last token the last page of all."""
    folder = folder_of("gemma3")
    settings: dict[str, Any] = {"num_pages": 64, "max_batched_tokens": 100, "max_running_requests": 1}
    text = (prompts(1, 7)[0] * 400)[:254]
    async with stack_of(folder, folder, **settings) as stack:
        window = stack.target.runner.sequences.window
        assert window is not None
        assert window.pool.num_pages < 50
        for length, max_tokens, num_drafts in ((125, 9, 0), (254, 2, 3), (205, 51, 0), (205, 51, 5)):
            prompt = text[:length]  # a part is found of the second, and all of the last
            result = await stack.generate(
                prompt_token_ids=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True,
                num_speculative_tokens=num_drafts,
            )  # fmt: skip
            expected = reference(folder, prompt, max_tokens, padding=range(NUM_TOKEN_IDS, NUM_ROWS))
            assert list(result.token_ids) == expected
        assert value(stack.target, "outrider_sessions_preempted_total") == 0
        await all_free(stack)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_5_text"])
async def test_a_draft_with_experts_or_recurrent_layers_changes_no_token(architecture: str) -> None:
    folder, draft = cached_tiny_model("llama", seed=1), cached_tiny_model(architecture, seed=2)
    async with greedy_stack_of(folder, draft, wire=True) as stack:
        await check_batch(stack, folder, 5, seed=4)


@pytest.mark.parametrize("name", ["exaone4", "gpt_neox", "granitemoe", "vaultgemma"])
async def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """All drafts are accepted if what transformers computes is drafted by itself. The slow matrix has all others."""
    folder, prompt = build_fallback(name), prompts(5, 3)[-1]
    async with stack_of(folder, folder) as stack:
        result = await stack.generate(
            prompt_token_ids=prompt, max_tokens=21, temperature=0, ignore_eos=True, num_speculative_tokens=4
        )
    assert list(result.token_ids) == reference(folder, prompt, 21, padding=range(NUM_TOKEN_IDS, NUM_ROWS))
    assert result.speculation.acceptance_histogram == (0, 0, 0, 0, 4)
