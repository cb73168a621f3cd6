"""One scenario in process and with every hop over gRPC: what users hold is equal to the last number."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.generation import GenerationResult, Timing
from tests.end_to_end.waiting import Reader, all_free, eventually
from tests.support.coordinator_stats import stats_of
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

TARGET = cached_tiny_model("llama", seed=1)
NO_TIME = Timing(0.0, 0.0, 0.0)

SCENARIO: list[dict[str, Any]] = [
    {"prompt": "x", "temperature": 0, "seed": 0},
    {"prompt": "Grüße, 世界", "temperature": 0, "num_speculative_tokens": 7, "logprobs": 0, "seed": 2**64 - 1},
    {"prompt_token_ids": [7], "seed": 1},
    {"prompt_token_ids": list(range(90)), "seed": 2, "logprobs": 3, "prompt_logprobs": 2},
    {"prompt": "abcabcabc", "seed": 3, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    {"prompt": "abcabcabc", "seed": 4, "acceptance_method": "coupled", "logprobs": 5},
    {"prompt": "abcabcabc", "seed": 5, "acceptance_method": "typical", "temperature": 0.7},
    {"prompt": "abcabcabc", "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"prompt": "stop", "seed": 7, "stop": ["a", "e", "th"], "include_stop_str_in_output": True},
    {"prompt": "stop", "seed": 8, "stop_token_ids": list(range(40)), "min_tokens": 3},
    {"prompt": "words", "seed": 9, "bad_words": ["a", "the"], "logit_bias": {5: 7.5, 6: -100.0}},
    {"prompt": "few", "seed": 10, "allowed_token_ids": [64, 65, 66, 256], "ignore_eos": True},
    {"prompt": "none", "seed": 11, "num_speculative_tokens": 0, "max_tokens": 1},
    {"prompt": "no way on", "seed": 12, "allowed_token_ids": [64], "bad_words": ["aa"]},
    {"prompt_token_ids": [300], "seed": 13},
    {"prompt_token_ids": list(range(241)), "max_tokens": 4000, "ignore_eos": True, "seed": 14},
]


async def held(stack: Stack, index: int, options: dict[str, Any]) -> GenerationResult | tuple[str, str, str]:
    """Result of a user; the stream says the same, piece by piece."""
    reader = Reader(stack, **{"max_tokens": 25, "request_id": f"r{index}", **options})
    try:
        last = await reader.finish()
    except OutriderError as error:
        return type(error).__name__, str(error), error.field
    assert last.result is not None
    assert (reader.text, reader.token_ids) == (last.result.text, last.result.token_ids)
    if last.result.logprobs is not None:
        assert last.result.logprobs == tuple(entry for delta in reader.deltas for entry in delta.logprobs or ())
    return replace(last.result, timing=NO_TIME)


def are_pages_told(stack: Stack) -> bool:
    """True if the coordinator knows of all free pages; over the wire they are told with the next heartbeat."""
    stats = stats_of(stack.coordinator)
    for service, told in ((stack.target, stats.target_pages_free), (stack.draft, stats.draft_pages_free)):
        runner = None if service is None else service.runner
        if runner is not None and told != runner.sequences.pool.num_free:
            return False
    return True


async def play(draft: Path | str | None, *, wire: bool) -> tuple[list[object], object]:
    small = {"max_batched_tokens": 32, "page_size": 4}
    async with run_stack(
        TARGET,
        draft,
        wire=wire,
        target_settings=small,
        draft_settings={"prompt_lookup_min": 1, "prompt_lookup_max": 3} if draft == "ngram" else small,
        draft_timeout_ms=60_000,
    ) as stack:
        results: list[object] = [await held(stack, index, options) for index, options in enumerate(SCENARIO)]
        await all_free(stack)
        await eventually(lambda: are_pages_told(stack), "free pages that the coordinator knows of")
        info = await stack.client.model_info() if stack.client else await stack.coordinator.model_info()
        return results, info


@pytest.mark.parametrize("kind", ["near", "far", "ngram", "missing"])
async def test_in_process_and_over_grpc_are_the_same(kind: str) -> None:
    drafts: dict[str, Path | str | None] = {"near": TARGET, "far": cached_tiny_model("qwen2", seed=9), "ngram": "ngram"}
    inside = await play(drafts.get(kind), wire=False)
    outside = await play(drafts.get(kind), wire=True)
    assert isinstance(inside[0][-1], GenerationResult) and len(inside[0][-1].token_ids) == 256 - 241
    for options, one, other in zip(SCENARIO, inside[0], outside[0], strict=True):
        assert one == other, options
    assert inside[1] == outside[1]
    assert sum(isinstance(result, tuple) for result in inside[0]) == 2
    drafted = sum(r.speculation.num_draft_tokens for r in inside[0] if isinstance(r, GenerationResult))
    assert (drafted > 0) == (kind != "missing")


async def test_a_batch_gives_the_same_tokens_in_process_and_over_grpc() -> None:
    """Steps fall together otherwise each time; greedy and coupled do not depend on it."""
    held_by: list[list[tuple[int, ...]]] = []
    for wire in (False, True):
        async with run_stack(TARGET, TARGET, wire=wire, draft_timeout_ms=60_000) as stack:
            results = await asyncio.gather(
                *(
                    stack.generate(
                        prompt_token_ids=list(range(1 + 3 * index)),
                        max_tokens=20 + index,
                        temperature=index % 2,
                        acceptance_method="coupled",
                        num_speculative_tokens=index % 5,
                        seed=index,
                    )
                    for index in range(12)
                )
            )
            held_by.append([result.token_ids for result in results])
    assert held_by[0] == held_by[1]
