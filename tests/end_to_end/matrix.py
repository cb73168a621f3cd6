"""Matrix of what a model is held against: every family and format, one way of serving after the other.

Greedy tokens are those that transformers' model finds most likely after the text so far, in one forward of the whole
text, so many prompts cost little. Coupled tokens are those of the target alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.end_to_end.faults import outage
from tests.end_to_end.test_greedy import CHUNK, NUM_TOKEN_IDS
from tests.end_to_end.test_preemption import value
from tests.end_to_end.waiting import all_free
from tests.support.service_rig import ServiceRig
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import cached_tiny_model

MAX_TOKENS = 8
SMALL_POOL = 60
"""Pages of a pool that all requests together do not fit into."""
PAGES = {"page_size": 4, "max_batched_tokens": CHUNK, "state_snapshot_interval": 4}
TIE = 2e-5
"""Difference of two logits in float32 below which either token is right."""
Tokens = list[tuple[int, ...]]
Reference = Callable[[torch.Tensor], torch.Tensor]
"""Logits [1, T, V] of a text [1, T]."""


@dataclass(frozen=True)
class Model:
    """A folder to be served, and transformers' model of it."""

    folder: Path
    reference: Reference
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the target, and of a draft that is the same model."""


def make_prompts(count: int) -> list[list[int]]:
    """Prompts of one token to three chunks, of which some begin alike."""
    source = random.Random(count)
    starts = [[source.randrange(NUM_TOKEN_IDS) for _ in range(3 * CHUNK)] for _ in range(8)]
    made = []
    for index in range(count):
        start = starts[index % len(starts)][: source.randint(0, 2 * CHUNK)]
        made.append(start + [source.randrange(NUM_TOKEN_IDS) for _ in range(source.randint(1, CHUNK))])
    return made


def requests_of(prompts: Sequence[list[int]], num_coupled: int) -> list[dict[str, Any]]:
    """Every prompt greedily, and the first ones with coupled acceptance and a seed."""
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    greedy = [{**common, "prompt_token_ids": prompt, "temperature": 0} for prompt in prompts]
    coupled = [
        {**common, "prompt_token_ids": prompt, "seed": number, "acceptance_method": "coupled"}
        for number, prompt in enumerate(prompts[:num_coupled])
    ]
    return greedy + coupled


def alone(model: Model, requests: Sequence[dict[str, Any]]) -> Tokens:
    """One request after the other, without a draft and in a service without threads: hundreds cost little."""
    rig = ServiceRig(
        model.folder, None, max_model_len=4 * CHUNK, target_forward=CHUNK, num_speculative_tokens=0,
        target_options={"page_size": 4, **model.settings},
    )  # fmt: skip
    return [tuple(*rig.generate([request])) for request in requests]


async def together(
    stack: Stack,
    requests: Sequence[dict[str, Any]],
    faults: Sequence[tuple[float, Callable[[], Awaitable[None]]]] = (),
    *,
    drafts: bool = True,
) -> tuple[Tokens, int]:
    """All requests at once with draft lengths from 1 to 8, or without drafts, and the number of accepted drafts. Each
    fault comes when that share of all tokens has arrived.
    """
    waiting, num_received, num_accepted = list(faults), 0, 0

    async def stream(index: int, request: dict[str, Any]) -> tuple[int, ...]:
        nonlocal num_received, num_accepted
        token_ids: list[int] = []
        async for delta in stack.stream(**request, num_speculative_tokens=1 + index % 8 if drafts else 0):
            token_ids += delta.token_ids
            num_received += len(delta.token_ids)
            if delta.result is not None:
                num_accepted += delta.result.speculation.num_accepted_tokens
            if waiting and num_received > waiting[0][0] * MAX_TOKENS * len(requests):
                await waiting.pop(0)[1]()
        return tuple(token_ids)

    found = await asyncio.gather(*(stream(index, request) for index, request in enumerate(requests)))
    assert not waiting
    return list(found), num_accepted


def check_greedy(reference: Reference, prompts: Sequence[list[int]], tokens: Tokens) -> None:
    """Each token is the most likely one after the text before it."""
    for prompt, found in zip(prompts, tokens, strict=False):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *found]]))[0, len(prompt) - 1 : -1, :NUM_TOKEN_IDS]
        given = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert (logits.amax(1) - given).max() <= TIE, (prompt, found, logits.argmax(1).tolist())


async def play_outgrowing(stack: Stack, model: Model, prompts: Sequence[list[int]]) -> None:
    """Begin short prompts together that outgrow a small pool together, so that some are preempted."""
    count, page = 8, PAGES["page_size"]
    max_tokens = 3 * SMALL_POOL * page // (2 * count)
    short = [prompt[:page] for prompt in prompts[:count]]
    common = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    found, _ = await together(stack, [{**common, "prompt_token_ids": prompt} for prompt in short])
    assert {len(token_ids) for token_ids in found} == {max_tokens}
    check_greedy(model.reference, short, found)
    assert value(stack.target, "outrider_sessions_preempted_total") > 0


async def play(model: Model, *, num_prompts: int, num_coupled: int) -> None:
    """Play a model in the type of its files: in float32, which services have on a CPU, a sum in another order would
    round an input of a product in FP8 otherwise.
    """
    with mock.patch("outrider.model_executor.distributed.runner.prepare_device", lambda *given: "auto"):
        await _play(model, num_prompts=num_prompts, num_coupled=num_coupled)


async def _play(model: Model, *, num_prompts: int, num_coupled: int) -> None:
    """Serve a model alone, with itself as its draft in small pools, and with another draft while services are lost."""
    prompts = make_prompts(num_prompts)
    requests = requests_of(prompts, num_coupled)
    expected = alone(model, requests)
    check_greedy(model.reference, prompts, expected)
    limits: dict[str, Any] = {"draft_timeout_ms": 60_000}
    small = {**PAGES, **model.settings, "num_pages": SMALL_POOL}
    async with run_stack(
        model.folder, model.folder, wire=False, target_settings=small, draft_settings=small, **limits
    ) as stack:
        found, num_accepted = await together(stack, requests)
        assert found == expected, "with the model as its own draft"
        assert num_accepted > MAX_TOKENS * len(requests) // 3, num_accepted
        for _ in range(2):  # whose prefixes are in the cache the second time
            again, _ = await together(stack, requests[-4:])
            assert again == expected[-4:], "with prefixes of the cache"
        assert value(stack.target, "outrider_prefix_cache_hits_total") > 0
        await play_outgrowing(stack, model, prompts)
        await all_free(stack)
    settings = {**PAGES, **model.settings, "prefix_caching": False}
    other = cached_tiny_model("llama", seed=9)
    async with run_stack(
        model.folder, other, wire=True, target_settings=settings, draft_settings=PAGES, **limits
    ) as stack:
        stack.client = None  # straight at the coordinator: links are over gRPC

        async def lose_draft() -> None:
            await stack.draft_server.stop()

        async def lose_target() -> None:
            async with outage(stack, "target"):
                pass

        found, _ = await together(stack, requests, [(1 / 3, lose_draft), (2 / 3, lose_target)])
        assert found == expected, "with another draft, and services lost"


async def play_shared(model: Model, *, num_prompts: int, num_coupled: int) -> None:
    """Serve a model by two processes over gloo, with itself as its draft, in small pools."""
    prompts = make_prompts(num_prompts)
    requests = requests_of(prompts, num_coupled)
    small = {**PAGES, **model.settings, "num_pages": SMALL_POOL}
    shared = {**small, "device": "cpu", "tensor_parallel_size": 2}
    async with run_stack(
        model.folder, model.folder, wire=False, target_settings=shared, draft_settings=small, draft_timeout_ms=60_000
    ) as stack:
        assert (await stack.target.describe()).tensor_parallel_size == 2
        expected, _ = await together(stack, requests, drafts=False)
        check_greedy(model.reference, prompts, expected)
        found, num_accepted = await together(stack, requests)
        assert found == expected, "with the model as its own draft"
        assert num_accepted > MAX_TOKENS * len(requests) // 3, num_accepted
        await play_outgrowing(stack, model, prompts)
        await all_free(stack)
