"""Models with recurrent layers through the whole stack: as targets, as drafts and ahead of verdicts, with few slots for
their states and few pages. Float32. ``test_matrix`` plays them with other drafts.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_direct_proposals import introduced
from tests.end_to_end.test_greedy import CHUNK, NUM_ROWS, NUM_TOKEN_IDS, check_batch, prompts, reference, stack_of
from tests.end_to_end.test_preemption import value
from tests.end_to_end.waiting import all_free
from tests.support.hybrid_mtp import build_hybrid_mtp
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

FAMILIES = ["qwen3_5", "qwen3_next"]


@pytest.mark.parametrize("architecture", FAMILIES)
async def test_another_hybrid_as_draft_changes_no_token(architecture: str) -> None:
    """Every draft length from 0 to 8, alone and together; prompts of several chunks."""
    folder = cached_tiny_model(architecture, seed=1)
    async with stack_of(folder, cached_tiny_model("qwen3_5_text", seed=9), wire=False) as stack:
        for count in (1, 9):
            await check_batch(stack, folder, count, seed=count)
        await all_free(stack)
        for service in (stack.target, stack.draft):
            assert value(service, "outrider_sessions_lost_total") == 0  # states go back as far as it takes


async def test_requests_beyond_the_slots_wait_for_one() -> None:
    """A target with few slots for states refuses sessions, and a draft without one leaves them without drafts."""
    folder, texts = cached_tiny_model("qwen3_5", seed=1), prompts(12, 9)
    few = {"max_batched_tokens": CHUNK, "page_size": 4, "max_running_requests": 1, "prefix_caching": False}
    async with run_stack(
        folder, folder, wire=False, target_settings=few, draft_settings=few, draft_timeout_ms=60_000
    ) as stack:
        assert stack.target.runner is not None
        assert stack.target.runner.kv_cache.num_state_slots == 5
        results = await asyncio.gather(
            *(
                stack.generate(
                    prompt_token_ids=text,
                    max_tokens=12,
                    temperature=0,
                    ignore_eos=True,
                    num_speculative_tokens=index % 9,
                )
                for index, text in enumerate(texts)
            )
        )
        await all_free(stack)
    for text, result in zip(texts, results, strict=True):
        assert list(result.token_ids) == reference(folder, text, 12, padding=range(NUM_TOKEN_IDS, NUM_ROWS))


@pytest.mark.parametrize("draft", [1, 9], ids=["same model", "other draft"])
async def test_proposals_ahead_of_verdicts_change_no_token(draft: int) -> None:
    """A draft goes on from its own proposals, and takes back what was not accepted."""
    folder, texts = cached_tiny_model("qwen3_5", seed=1), prompts(5, 3)
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "acceptance_method": "coupled"}
    async with run_stack(folder, None, wire=False) as stack:
        expected = [(await stack.generate(prompt_token_ids=text, seed=3, **options)).token_ids for text in texts]
    drafting = cached_tiny_model("qwen3_5", seed=draft)
    async with run_stack(folder, drafting, wire=True, draft_ahead="chain", draft_timeout_ms=60_000) as stack:
        await introduced(stack)
        for text, tokens in zip(texts, expected, strict=True):
            result = await stack.generate(prompt_token_ids=text, seed=3, num_speculative_tokens=4, **options)
            assert result.token_ids == tokens
        assert stack.draft is not None
        assert value(stack.draft, "outrider_sessions_lost_total") == 0
        await all_free(stack)


@pytest.mark.parametrize("seed", [1, 9], ids=["same model", "other draft"])
async def test_a_pair_with_experts_equals_transformers_under_preemption(seed: int) -> None:
    """Recurrent layers and experts in draft and target, drafts of 4 tokens over the wire, and small pools."""
    folder = cached_tiny_model("qwen3_next", seed=1)
    async with short_of_pages(folder, cached_tiny_model("qwen3_next", seed=seed), wire=True) as stack:
        accepted = await check_short_of_pages(stack, folder)
        assert (accepted > 0) >= (seed == 1)


@pytest.mark.parametrize("architecture", FAMILIES)
async def test_mtp_layers_of_a_target_change_no_token(architecture: str, tmp_path: Path) -> None:
    """A target is preempted, and its states are sent again."""
    folder = build_hybrid_mtp(tmp_path / "target", architecture)
    of_draft = {"method": "mtp", "target_model": str(folder)}
    async with short_of_pages(folder, "mtp", wire=False, **of_draft) as stack:
        await check_short_of_pages(stack, folder)


def short_of_pages(
    folder: Path, draft: Path | str, *, wire: bool, **of_draft: Any
) -> AbstractAsyncContextManager[Stack]:
    small = {"max_batched_tokens": CHUNK, "page_size": 4, "num_pages": 60}
    return run_stack(
        folder, draft, wire=wire, target_settings=small, draft_settings={**small, **of_draft}, draft_length="fixed",
        num_speculative_tokens=4, draft_timeout_ms=60_000,
    )  # fmt: skip


async def check_short_of_pages(stack: Stack, folder: Path) -> int:
    """Greedy output is that of transformers; returns the number of accepted tokens."""
    texts = [prompt + [1] * 30 for prompt in prompts(6, 5)]
    results = await asyncio.gather(
        *(stack.generate(prompt_token_ids=text, max_tokens=30, temperature=0, ignore_eos=True) for text in texts)
    )
    assert value(stack.target, "outrider_sessions_preempted_total") > 0
    for text, result in zip(texts, results, strict=True):
        assert list(result.token_ids) == reference(folder, text, 30, padding=range(NUM_TOKEN_IDS, NUM_ROWS))
    assert sum(result.speculation.num_draft_tokens for result in results) > 100
    return sum(result.speculation.num_accepted_tokens for result in results)
