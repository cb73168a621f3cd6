"""Rejection with a fixed draft length repeats under its seed, whatever else is in the batch. Float32."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from outrider.generation import GenerationResult
from tests.support.small_models import SmallModels, build_small_models
from tests.support.stack import Stack, run_stack

VOCAB_SIZE = 24
OTHERS = 12
MINE: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3, 1, 2, 3, 4, 1],
    "max_tokens": 40,
    "ignore_eos": True,
    "seed": 2**63 + 7,
    "num_speculative_tokens": 4,
    "acceptance_method": "rejection",
}
SAMPLINGS: list[dict[str, Any]] = [{}, {"top_k": 8}, {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return build_small_models(tmp_path_factory.mktemp("models"), vocab_size=VOCAB_SIZE, num_hidden_layers=2)


def stack_of(models: SmallModels, draft: Path | str | None, *, wire: bool = False) -> Any:
    ngram = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return run_stack(
        models.target,
        draft,
        wire=wire,
        target_settings={"page_size": 4, "max_batched_tokens": 48},
        draft_settings=ngram if draft == "ngram" else {"support_limit": 8},
        draft_timeout_ms=60_000,
    )


def others() -> list[dict[str, Any]]:
    """Requests of every kind, which start and end at different times."""
    source = random.Random(1)
    return [
        {
            "prompt_token_ids": [source.randrange(VOCAB_SIZE) for _ in range(1 + 9 * (index % 6))],
            "max_tokens": 5 + 4 * index,
            "ignore_eos": True,
            "seed": index,
            "num_speculative_tokens": index % 7,
            "acceptance_method": ["rejection", "coupled", "typical"][index % 3],
            "temperature": [0.0, 1.0, 0.6, 1.3][index % 4],
            "logprobs": 2 if index % 5 == 0 else None,
        }
        for index in range(OTHERS)
    ]


async def beside_others(stack: Stack, options: dict[str, Any]) -> GenerationResult:
    requests = others()
    requests.insert(OTHERS // 2, options)
    results = await asyncio.gather(*(stack.generate(**request) for request in requests))
    return results[OTHERS // 2]


@pytest.mark.parametrize(
    ("draft", "sampling"),
    [
        *(("good", sampling) for sampling in SAMPLINGS),
        ("bad", SAMPLINGS[0]),
        ("bad", SAMPLINGS[2]),
        ("ngram", SAMPLINGS[1]),
    ],
    ids=str,
)
async def test_it_repeats_whatever_else_is_in_the_batch(
    models: SmallModels, draft: str, sampling: dict[str, Any]
) -> None:
    async with stack_of(models, models.draft(draft)) as stack:
        alone = await stack.generate(**MINE, **sampling)
        crowded = await beside_others(stack, {**MINE, **sampling})
        again = await stack.generate(**MINE, **sampling)
    assert alone.token_ids == crowded.token_ids == again.token_ids
    assert alone.speculation == crowded.speculation == again.speculation
    assert alone.speculation.num_accepted_tokens < alone.speculation.num_draft_tokens or sampling
    assert alone.speculation.num_accepted_tokens > 0 or draft == "bad"  # whose favourites top-k may all cut off


async def test_it_repeats_over_grpc_what_it_gave_in_process(models: SmallModels) -> None:
    async with stack_of(models, models.good) as stack:
        in_process = await stack.generate(**MINE)
    async with stack_of(models, models.good, wire=True) as stack:
        crowded = await beside_others(stack, MINE)
    assert crowded.token_ids == in_process.token_ids
    assert crowded.speculation == in_process.speculation


@pytest.mark.parametrize("method", ["rejection", "coupled", "typical"])
async def test_the_seed_that_an_unseeded_request_returns_repeats_it(models: SmallModels, method: str) -> None:
    unseeded = {**MINE, "acceptance_method": method}
    del unseeded["seed"]
    async with stack_of(models, models.good, wire=True) as stack:
        first = await stack.generate(**unseeded)
        other = await stack.generate(**unseeded)
        repeated = await stack.generate(**unseeded, seed=first.seed)
    assert repeated.token_ids == first.token_ids
    assert repeated.seed == first.seed
    assert other.seed != first.seed
    assert other.token_ids != first.token_ids
