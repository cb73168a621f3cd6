"""Prefix caching through all services: tokens are those without it, and users are told what was cached. Float32."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.generation import GenerationResult
from outrider.readings import Reading
from tests.support.small_models import SmallModels, build_small_models
from tests.support.stack import Stack, run_stack

VOCAB_SIZE, PAGE = 24, 4
SHARED = [(5 * i) % VOCAB_SIZE for i in range(40)]
PROMPTS = [SHARED, [*SHARED[:30], 1, 2], [*SHARED, 3], [7], SHARED]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"acceptance_method": "coupled"},
    {"acceptance_method": "coupled", "temperature": 0.7, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return build_small_models(tmp_path_factory.mktemp("models"), vocab_size=VOCAB_SIZE, num_hidden_layers=2)


def stack_of(models: SmallModels, *, wire: bool = False, prefix_caching: bool = True) -> Any:
    settings = {"page_size": PAGE, "max_batched_tokens": 32, "prefix_caching": prefix_caching}
    return run_stack(
        models.target,
        models.good,
        wire=wire,
        target_settings=settings,
        draft_settings=settings,
        draft_timeout_ms=60_000,
    )


async def rounds(stack: Stack, **options: Any) -> list[GenerationResult]:
    """All prompts in all ways, first one after the other and then together."""
    cases = [
        {"prompt_token_ids": prompt, "seed": number, "max_tokens": 20, "ignore_eos": True, **sampling, **options}
        for number, (prompt, sampling) in enumerate((prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS)
    ]
    in_turn = [await stack.generate(**case) for case in cases]
    return in_turn + await asyncio.gather(*(stack.generate(**case) for case in cases))


async def test_tokens_are_the_same_with_the_cache_on_and_off(models: SmallModels) -> None:
    async with stack_of(models, wire=True) as stack:
        cached = await rounds(stack)
        assert value(stack.target, "outrider_prefix_cache_hits_total") > 30 * PAGE
        assert value(stack.draft, "outrider_prefix_cache_hits_total") > 30 * PAGE
    async with stack_of(models, prefix_caching=False) as stack:
        alone = await rounds(stack)
        assert value(stack.target, "outrider_prefix_cache_queries_total") == 0
    assert [result.token_ids for result in cached] == [result.token_ids for result in alone]
    assert not any(result.usage.cached_prompt_tokens for result in alone)


def value(service: Any, name: str) -> float:
    readings: list[Reading] = [reading for reading in service.readings() if reading.name == name]
    assert len(readings) == 1
    found = readings[0].value
    assert isinstance(found, int | float)
    return found


async def test_users_are_told_what_was_cached_and_salts_share_nothing(models: SmallModels) -> None:
    async with stack_of(models, wire=True) as stack:

        async def ask(salt: str | None = None, **options: Any) -> tuple[int, int]:
            result = await stack.generate(prompt_token_ids=SHARED, max_tokens=2, seed=1, cache_salt=salt, **options)
            return result.usage.prompt_tokens, result.usage.cached_prompt_tokens

        assert await ask() == (40, 0)
        assert await ask() == (40, 36)
        assert await ask("tenant") == (40, 0)
        assert await ask("another") == (40, 0)
        assert await ask("tenant") == (40, 36)
        assert await ask(prompt_logprobs=1) == (40, 0)


async def test_one_token_is_enough_to_leave_a_prompt_behind(models: SmallModels) -> None:
    async with stack_of(models) as stack:
        for cached in (0, 36):
            result = await stack.generate(prompt_token_ids=SHARED, max_tokens=1)
            assert result.usage.cached_prompt_tokens == cached


async def test_logprobs_of_a_cached_prefix_are_the_same_within_rounding(models: SmallModels) -> None:
    async with stack_of(models) as stack:
        first, second = [
            await stack.generate(prompt_token_ids=SHARED, max_tokens=12, temperature=0, logprobs=3, ignore_eos=True)
            for _ in range(2)
        ]
        assert second.usage.cached_prompt_tokens == 36
        assert first.logprobs is not None
        assert second.logprobs is not None
        for one, other in zip(first.logprobs, second.logprobs, strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


async def test_a_cached_prompt_does_not_change_how_much_is_accepted(models: SmallModels) -> None:
    async with stack_of(models) as stack:
        options: dict[str, Any] = {"prompt_token_ids": SHARED, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        first, second = [(await stack.generate(**options)) for _ in range(2)]
        assert second.usage.cached_prompt_tokens == 36
        assert first.speculation == second.speculation
        assert first.speculation.num_accepted_tokens
