"""Properties of each proposer of the registry: pools that are too small, prompts in chunks, cached prefixes, links
that break under sessions, a draft that ends, draft lengths by request or by a controller, and a target of two processes
change no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.config.fields import DraftMethod
from outrider.generation import GenerationResult
from outrider_coordinator.routing import replica
from outrider_coordinator.service import Coordinator
from outrider_draft.proposers.registry import LOADERS
from outrider_draft.service import DraftService
from outrider_target.service import TargetService
from tests.draft_service.test_state_heads import medusa, speculator
from tests.end_to_end.faults import break_links
from tests.end_to_end.waiting import DEADLINE_S, Reader, again_until, all_free, eventually
from tests.support.coordinator_stats import stats_of
from tests.support.dflash import build_dflash
from tests.support.eagle3 import build_eagle3
from tests.support.pair_heads import build_eagle, build_mimo
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import build_tiny_model

WRITE: dict[DraftMethod, Callable[[Path], object]] = {
    DraftMethod.DRAFT_MODEL: lambda folder: build_tiny_model(folder, "qwen2", seed=2),
    DraftMethod.DFLASH: build_dflash,
    DraftMethod.EAGLE: build_eagle,
    DraftMethod.EAGLE3: build_eagle3,
    DraftMethod.MEDUSA: medusa,
    DraftMethod.MLP_SPECULATOR: speculator,
}
"""The methods with a checkpoint of their own, and what writes a random one."""
KEEPS_KV = {
    DraftMethod.DRAFT_MODEL,
    DraftMethod.DFLASH,
    DraftMethod.EAGLE,
    DraftMethod.EAGLE3,
    DraftMethod.MTP,
}
METHODS = pytest.mark.parametrize("method", list(LOADERS))
PAGE, CHUNK = 4, 16
START = [(11 * i) % 250 for i in range(8)] * 3
LENGTHS = (1, 2, 3, 5)
"""Draft tokens that a request asks for at most."""
FEW_IDS = {"allowed_token_ids": [5, 77, 140, 200]}
"""Few ids, with which a random head is right now and then."""
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, **FEW_IDS},
    {"temperature": 1.0, "acceptance_method": "coupled", **FEW_IDS},
    {"temperature": 0.7, "acceptance_method": "coupled", "repetition_penalty": 1.2},
]
REQUESTS: list[dict[str, Any]] = [
    {
        "prompt_token_ids": [*START[: 24 - 5 * (number % 3)], number, *range(number)],
        "seed": number,
        "max_tokens": 24,
        "ignore_eos": True,
        "num_speculative_tokens": LENGTHS[number // 2 % 4],
        **SAMPLING[number % 4],
    }
    for number in range(8)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, which has an MTP layer, and a checkpoint for each method that has one of its own."""
    root = tmp_path_factory.mktemp("proposers")
    build_mimo(root / "target")
    for method, write in WRITE.items():
        write(root / method)
    return root


@pytest.fixture(scope="module")
def expected(folders: Path) -> list[tuple[int, ...]]:
    """Output of the target alone."""

    async def plain() -> list[GenerationResult]:
        async with run_stack(folders / "target", None, wire=False) as stack:
            return await all_of(stack)

    return [result.token_ids for result in asyncio.run(plain())]


def settings_of(method: DraftMethod, folders: Path, **more: Any) -> dict[str, Any]:
    if method is DraftMethod.CUSTOM_CLASS:
        return {"method": "custom_class", "proposer": "tests.draft_service.repeat_last:RepeatLast", **more}
    found: dict[str, Any] = {"method": str(method), "num_threads": 1, **more}
    if method in WRITE:
        found["model"] = str(folders / method)
    if method.is_head:
        found["target_model"] = str(folders / "target")
    return found


@asynccontextmanager
async def stack_of(
    folders: Path, method: DraftMethod, *, target: dict[str, Any], draft: dict[str, Any], **coordinator: Any
) -> AsyncIterator[Stack]:
    of_draft = settings_of(method, folders, **(draft if method in KEEPS_KV else {}))
    async with run_stack(
        folders / "target", str(method), wire=False, draft_settings=of_draft, num_speculative_tokens=5,
        draft_timeout_ms=60_000, target_settings={"page_size": PAGE, **target}, **coordinator,
    ) as stack:  # fmt: skip
        yield stack


async def all_of(stack: Stack) -> list[GenerationResult]:
    return await asyncio.gather(*(stack.generate(**request) for request in REQUESTS))


def reading(service: Any, name: str) -> float:
    (found,) = [one.value for one in service.readings() if one.name == name]
    return found  # type: ignore[no-any-return]


def check(results: list[GenerationResult], expected: list[tuple[int, ...]]) -> None:
    """The tokens are the target's own, and no step drafted more than its request asked for."""
    assert [result.token_ids for result in results] == expected
    for request, result in zip(REQUESTS, results, strict=True):
        stats = result.speculation
        assert stats.num_draft_tokens <= request["num_speculative_tokens"] * stats.num_steps


def num_drafted(stack: Stack) -> int:
    """Draft tokens of all requests that have ended."""
    return stats_of(stack.coordinator).spec_stats.num_draft_tokens


def has_drafts(stack: Stack) -> bool:
    """True if a request that runs had draft tokens."""
    manager = stack.coordinator.request_manager
    return manager.spec_stats().num_draft_tokens > manager.endings.spec_stats.num_draft_tokens


async def draft_attached(stack: Stack) -> None:
    await eventually(lambda: stats_of(stack.coordinator).num_drafts == 1, "the draft attached")


@METHODS
async def test_small_pools_chunks_and_cached_prefixes(
    folders: Path, expected: list[tuple[int, ...]], method: DraftMethod
) -> None:
    few = {"max_batched_tokens": CHUNK}
    of_target, of_draft = {**few, "num_pages": 44}, {**few, "num_pages": 26, "page_size": PAGE}
    async with stack_of(folders, method, target=of_target, draft=of_draft) as stack:
        small = [stack.target, stack.draft] if method in KEEPS_KV else [stack.target]

        def figures() -> list[float]:
            names = ("outrider_sessions_preempted_total", "outrider_prefix_cache_hits_total")
            return [num_drafted(stack), *(reading(service, name) for service in small for name in names)]

        async def play() -> None:
            check(await all_of(stack), expected)

        await again_until(lambda: min(figures()) > 0, play)
        assert min(figures()) > 0, figures()
        assert stats_of(stack.coordinator).num_failed == 0
        await all_free(stack)


@METHODS
async def test_links_that_break_and_sessions_that_are_rebuilt(
    folders: Path, expected: list[tuple[int, ...]], method: DraftMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "RETRY_S", 0.0)  # so that the draft is back before the streams end
    async with stack_of(folders, method, target={}, draft={"page_size": PAGE}) as stack:

        def num_rebuilds() -> int:
            spec_stats = stats_of(stack.coordinator).spec_stats
            return min(spec_stats.num_draft_rebuilds, spec_stats.num_target_rebuilds)

        async def play() -> None:
            await draft_attached(stack)
            readers = [Reader(stack, **request) for request in REQUESTS]
            await asyncio.gather(*(reader.read(6) for reader in readers))
            break_links(stack.draft)
            await asyncio.gather(*(reader.read(10) for reader in readers))
            break_links(stack.target)
            await asyncio.gather(*(reader.read(14) for reader in readers))
            await draft_attached(stack)
            break_links(stack.draft)
            check(await results_of(readers), expected)

        # A draft that gets little of its processor may be back only when the streams have ended.
        await again_until(lambda: num_rebuilds() >= 4 and num_drafted(stack), play)
        assert num_rebuilds() >= 4
        assert num_drafted(stack) > 0
        assert stats_of(stack.coordinator).num_failed == 0
        await all_free(stack)


async def results_of(readers: list[Reader]) -> list[GenerationResult]:
    """The results of streams that are read to their ends, which say the same as their deltas."""
    results = [(await reader.finish()).result for reader in readers]
    assert [reader.token_ids for reader in readers] == [result.token_ids for result in results if result is not None]
    return [result for result in results if result is not None]


@METHODS
async def test_a_controller_chooses_the_lengths(
    folders: Path, expected: list[tuple[int, ...]], method: DraftMethod
) -> None:
    """Controller that begins with drafts, and soon finds that random ones do not pay."""
    async with stack_of(folders, method, target={}, draft={"page_size": PAGE}, draft_length="auto") as stack:

        async def play() -> None:
            check(await all_of(stack), expected)

        # A slow draft may have the text only when the streams have ended.
        await again_until(lambda: num_drafted(stack), play)
        assert num_drafted(stack) > 0
        assert stack.coordinator.policy.is_controlled
        await all_free(stack)


@METHODS
async def test_a_draft_that_is_gone_for_good(
    folders: Path, expected: list[tuple[int, ...]], method: DraftMethod
) -> None:
    async with stack_of(folders, method, target={}, draft={"page_size": PAGE}) as stack:
        is_gone = False

        async def play() -> None:
            nonlocal is_gone
            readers = [Reader(stack, **request) for request in REQUESTS]
            for num_tokens in range(6, 20):  # n-grams may come back late
                await asyncio.gather(*(reader.read(num_tokens) for reader in readers))
                if is_gone := has_drafts(stack):
                    assert stack.draft is not None
                    await stack.draft.close()
                    break
            check(await results_of(readers), expected)

        await again_until(lambda: is_gone, play)
        assert is_gone
        assert num_drafted(stack) > 0
        assert stats_of(stack.coordinator).num_failed == 0


async def test_a_target_of_two_processes(folders: Path, expected: list[tuple[int, ...]]) -> None:
    """One target for all of them, one after the other."""
    model = {"model": str(folders / "target"), "device": "cpu", "num_threads": 1, "tensor_parallel_size": 2}
    target = TargetService.load(TargetSettings.model_validate({**model, "page_size": PAGE, "max_batched_tokens": 64}))
    try:
        for method in LOADERS:
            results = await _over(target, settings_of(method, folders))
            check(results, expected)
            assert sum(result.speculation.num_draft_tokens for result in results) > 0, method
    finally:
        await target.close()


async def _over(target: TargetService, settings: dict[str, Any]) -> list[GenerationResult]:
    draft = DraftService.load(DraftSettings.model_validate(settings))
    fixed = {"draft_length": "fixed", "num_speculative_tokens": 5, "draft_timeout_ms": 60_000}
    coordinator = Coordinator(target, draft, CoordinatorSettings.model_validate(fixed))
    try:
        await coordinator.start()
        async with asyncio.timeout(DEADLINE_S):
            return await all_of(Stack(target, draft, coordinator, None))
    finally:
        await coordinator.close()
        await draft.close()
