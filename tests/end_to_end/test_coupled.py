"""Coupled acceptance: under one seed the tokens are the target's own, whatever becomes of the draft. Float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.generation import GenerationResult
from outrider.ports import DraftCommand, DraftLink, Extend
from outrider.stalls import Stall
from tests.support.small_models import SmallModels, build_small_models
from tests.support.stack import Stack, run_stack
from tests.support.tiny_models import build_tiny_model

VOCAB_SIZE = 24
PROMPTS = [[1, 2, 3, 1, 2, 3, 4], [7], [(5 * i) % VOCAB_SIZE for i in range(40)]]
SAMPLINGS: list[dict[str, Any]] = [{}, {"top_k": 6}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return build_small_models(tmp_path_factory.mktemp("models"), vocab_size=VOCAB_SIZE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def unrelated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("unrelated"), "qwen3", vocab_size=VOCAB_SIZE, seed=77)


def stack_of(models: SmallModels, draft: Path | str | None, *, wire: bool = False) -> Any:
    settings: dict[str, Any] = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if draft == "ngram" else {}
    return run_stack(
        models.target,
        draft,
        wire=wire,
        target_settings={"page_size": 4, "max_batched_tokens": 32},
        draft_settings=settings,
        acceptance_method="coupled",
        draft_timeout_ms=60_000,
    )


async def outputs(stack: Stack, draft_lengths: Sequence[int]) -> list[GenerationResult]:
    """Every prompt with every way of sampling, all at once, each with a seed of its own."""
    cases = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
    return await asyncio.gather(
        *(
            stack.generate(
                prompt_token_ids=prompt,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                seed=100 + index,
                num_speculative_tokens=draft_lengths[index % len(draft_lengths)],
                **sampling,
            )
            for index, (prompt, sampling) in enumerate(cases)
        )
    )


@pytest.fixture(scope="module")
def alone(models: SmallModels) -> list[tuple[int, ...]]:
    """Output without any draft, one request after another."""

    async def generate() -> list[tuple[int, ...]]:
        async with stack_of(models, None) as stack:
            cases = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
            return [
                (
                    await stack.generate(
                        prompt_token_ids=prompt, max_tokens=MAX_TOKENS, ignore_eos=True, seed=100 + index, **sampling
                    )
                ).token_ids
                for index, (prompt, sampling) in enumerate(cases)
            ]

    return asyncio.run(generate())


@pytest.mark.parametrize("kind", ["good", "bad", "equal", "ngram", "unrelated"])
async def test_one_seed_gives_equal_tokens_with_any_draft_of_any_length(
    models: SmallModels, unrelated: Path, alone: list[tuple[int, ...]], kind: str
) -> None:
    draft = unrelated if kind == "unrelated" else models.draft(kind)
    async with stack_of(models, draft) as stack:
        for draft_length in (0, 1, 2, 5, 8):
            results = await outputs(stack, [draft_length])
            assert [result.token_ids for result in results] == alone, f"K = {draft_length}"
            num_drafted = sum(result.speculation.num_draft_tokens for result in results)
            assert (num_drafted > 0) == (draft_length > 0)
        async with asyncio.timeout(120):
            while stack.num_pages_used() != (0, 0):  # the releases are on their way
                await asyncio.sleep(0)


async def test_it_does_over_grpc_with_draft_lengths_mixed(models: SmallModels, alone: list[tuple[int, ...]]) -> None:
    async with stack_of(models, models.good, wire=True) as stack:
        results = await outputs(stack, range(9))
    assert [result.token_ids for result in results] == alone
    assert sum(result.speculation.num_accepted_tokens for result in results) > 0


async def test_different_seeds_give_different_tokens(models: SmallModels) -> None:
    async with stack_of(models, models.good) as stack:
        found = {
            (await stack.generate(prompt_token_ids=[1, 2, 3], max_tokens=12, ignore_eos=True, seed=seed)).token_ids
            for seed in range(8)
        }
    assert len(found) == 8


async def test_a_draft_killed_halfway_changes_nothing(models: SmallModels) -> None:
    options: dict[str, Any] = {"prompt_token_ids": PROMPTS[0], "max_tokens": 180, "ignore_eos": True, "seed": 5}
    async with stack_of(models, None) as stack:
        expected = (await stack.generate(**options)).token_ids
    async with stack_of(models, models.bad, wire=True) as stack:
        received: list[int] = []
        result: GenerationResult | None = None
        is_killed = False
        async for delta in stack.stream(num_speculative_tokens=4, **options):
            received += delta.token_ids
            result = delta.result or result
            if len(received) > 20 and not is_killed:
                is_killed = True
                await stack.draft_server.stop()
    assert result is not None
    assert tuple(received) == result.token_ids == expected
    with_draft = sum(result.speculation.acceptance_histogram)
    # Some steps had a proposal, and many after the kill had none; the prefill never has.
    assert 0 < with_draft < result.speculation.num_steps - 10


class DyingLink:
    """A draft's link that breaks at the nth proposal asked for: in the middle of a step, every time."""

    def __init__(self, inner: DraftLink, after: int) -> None:
        self._inner, self._left = inner, after
        self.events = inner.events

    @property
    def num_pages_free(self) -> int | None:
        return self._inner.num_pages_free

    @property
    def stall(self) -> Stall:
        return self._inner.stall

    def send(self, commands: Sequence[DraftCommand]) -> None:
        self._inner.send(commands)
        self._left -= sum(isinstance(command, Extend) for command in commands)
        if self._left < 0:
            self._inner.break_off("killed")  # type: ignore[attr-defined]

    async def close(self) -> None:
        await self._inner.close()


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
async def test_a_link_that_breaks_within_a_step_changes_nothing(
    models: SmallModels, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider_draft.service import DraftService

    attach = DraftService.attach

    async def attach_dying(self: DraftService) -> Any:
        return DyingLink(await attach(self), after)

    async with stack_of(models, None) as stack:
        expected = (await stack.generate(prompt_token_ids=[3, 4], max_tokens=40, ignore_eos=True, seed=9)).token_ids
    monkeypatch.setattr(DraftService, "attach", attach_dying)
    async with stack_of(models, models.good) as stack:
        result = await stack.generate(prompt_token_ids=[3, 4], max_tokens=40, ignore_eos=True, seed=9)
    assert result.token_ids == expected
