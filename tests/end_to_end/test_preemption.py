"""Pools that are too small for all requests: sessions are preempted and rebuilt, and no token is another. Float32."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import InvalidRequestError
from outrider.generation import GenerationResult
from tests.support.coordinator_stats import stats_of
from tests.support.small_models import SmallModels, build_small_models
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

VOCAB_SIZE, PAGE = 24, 4
PROMPTS = [[(5 * i + start) % VOCAB_SIZE for i in range(6 + 7 * start)] for start in range(6)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"acceptance_method": "coupled"},
    {"acceptance_method": "coupled", "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
]
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return build_small_models(tmp_path_factory.mktemp("models"), vocab_size=VOCAB_SIZE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(models: SmallModels) -> list[GenerationResult]:
    """Results with pools that hold all requests: no session was preempted."""

    async def play() -> list[GenerationResult]:
        async with stack_of(models, target_pages=512, draft_pages=512) as stack:
            found = await outputs(stack)
            for service in (stack.target, stack.draft):
                assert value(service, "outrider_sessions_preempted_total") == 0
            return found

    return asyncio.run(play())


def stack_of(models: SmallModels, *, target_pages: int, draft_pages: int, wire: bool = False, **more: Any) -> Any:
    common = {"page_size": PAGE, "max_batched_tokens": 16, **more}
    return run_stack(
        models.target,
        models.good,
        wire=wire,
        target_settings={"num_pages": target_pages, **common},
        draft_settings={"num_pages": draft_pages, **common},
        draft_timeout_ms=60_000,
    )


def value(service: Any, name: str) -> float:
    (found,) = [reading.value for reading in service.readings() if reading.name == name]
    return found  # type: ignore[no-any-return]


async def outputs(stack: Stack, **options: Any) -> list[GenerationResult]:
    """All prompts in all ways, at once, each with a seed of its own."""
    cases = [
        {
            "prompt_token_ids": prompt,
            "seed": number,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            **sampling,
            **options,
        }
        for number, (prompt, sampling) in enumerate((prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS)
    ]
    return await asyncio.gather(*(stack.generate(**case) for case in cases))


@pytest.mark.parametrize(
    ("target_pages", "draft_pages", "prefix_caching"),
    [(64, 512, True), (512, 64, True), (64, 64, False), (30, 30, True)],
)
async def test_tokens_are_those_of_a_pool_for_all(
    models: SmallModels,
    expected: list[GenerationResult],
    target_pages: int,
    draft_pages: int,
    prefix_caching: bool,
) -> None:
    small = stack_of(models, target_pages=target_pages, draft_pages=draft_pages, prefix_caching=prefix_caching)
    async with small as stack:
        found = await outputs(stack)
        for service, num_pages in ((stack.target, target_pages), (stack.draft, draft_pages)):
            assert (value(service, "outrider_sessions_preempted_total") > 0) == (num_pages < 512)
        assert stats_of(stack.coordinator).num_failed == 0
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]


async def test_over_the_wire_and_without_drafts(models: SmallModels, expected: list[GenerationResult]) -> None:
    async with stack_of(models, target_pages=40, draft_pages=40, wire=True) as stack:
        plain = await outputs(stack, num_speculative_tokens=0)
        drafted = await outputs(stack)
        assert value(stack.target, "outrider_sessions_preempted_total") > 0
    assert [result.token_ids for result in plain] == [result.token_ids for result in expected]
    assert [result.token_ids for result in drafted] == [result.token_ids for result in expected]


async def test_waiting_for_pages_is_queue_time(models: SmallModels) -> None:
    async with stack_of(models, target_pages=20, draft_pages=512) as stack:
        results = await asyncio.gather(
            *(
                stack.generate(prompt_token_ids=PROMPTS[1], seed=seed, max_tokens=60, ignore_eos=True, temperature=0)
                for seed in range(3)
            )
        )
        first, *_, last = sorted(results, key=lambda result: result.timing.total)
        assert last.timing.queue > 0.3 * first.timing.total
        assert last.timing.queue < last.timing.total


async def test_sixty_short_requests_run_at_the_same_time_in_a_pool_for_four_long_ones() -> None:
    """Requests end after 200 tokens, prompt included, and might take 4,000, in a pool of 16,000 tokens."""
    settings = {"page_size": 16, "num_pages": 1000, "max_batched_tokens": 2048}
    most_running = 0
    folder = cached_tiny_model("llama", seed=1, max_position_embeddings=8192)
    async with run_stack(folder, wire=False, target_settings=settings) as stack:

        async def one(number: int) -> int:
            nonlocal most_running
            num_tokens = 0
            prompt = [(number + 5 * i) % VOCAB_SIZE for i in range(190)]
            async for delta in stack.stream(prompt_token_ids=prompt, max_tokens=4_000, ignore_eos=True, temperature=0):
                num_tokens += len(delta.token_ids)
                most_running = max(most_running, stack.coordinator.num_running)
                if num_tokens >= 10:
                    break
            return num_tokens

        assert min(await asyncio.gather(*(one(number) for number in range(60)))) >= 10
        assert stats_of(stack.coordinator).num_failed == 0
        assert value(stack.target, "outrider_sessions_preempted_total") == 0
    assert most_running == 60


async def test_what_fits_no_empty_pool_is_refused_at_once(models: SmallModels) -> None:
    async with stack_of(models, target_pages=20, draft_pages=20) as stack:
        with pytest.raises(InvalidRequestError, match="need 21 KV pages, and the target has 20 in all"):
            await stack.generate(prompt_token_ids=PROMPTS[0], max_tokens=78)
