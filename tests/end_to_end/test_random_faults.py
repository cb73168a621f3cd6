"""Drafting ahead under random faults of its channel, the path of that, both services and their pages."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.generation import GenerationResult
from outrider.model_executor.distributed import runner
from outrider_coordinator.speculation import order
from tests.end_to_end.random_faults import Faults, Messages, left_nothing, through_a_proxy
from tests.end_to_end.test_direct_proposals import COUPLED, GREEDY, PATIENT, SAMPLED, TARGET, introduced
from tests.end_to_end.waiting import DEADLINE_S
from tests.support.draft_loops import LoopedRunner
from tests.support.stack import Stack, run_stack

torch.set_num_threads(1)

NUM_PROMPTS, LONGEST, NUM_REQUESTS = 12, 90, 16
FEW_PAGES: dict[str, Any] = {"page_size": 4, "num_pages": 110}
Rule = dict[str, Any]


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is right now and then: the target, with noise on its weights."""
    folder = tmp_path_factory.mktemp("near") / "model"
    shutil.copytree(TARGET, folder)
    chance = torch.Generator().manual_seed(5)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        for weight in weights.values():
            if weight.ndim > 1:
                weight.add_(torch.randn(weight.shape, generator=chance), alpha=0.12 * float(weight.std()))
        save_file(weights, path, metadata={"format": "pt"})
    return folder


def request(rule: Rule, prompt: int, max_tokens: int) -> dict[str, Any]:
    common = {"max_tokens": max_tokens, "ignore_eos": True, "seed": prompt, **rule}
    return {"prompt_token_ids": [72, 101, 108, prompt], **common}


_EXPECTED: dict[str, list[GenerationResult]] = {}


async def expected_of(rule: Rule) -> list[GenerationResult]:
    if (key := repr(rule)) not in _EXPECTED:
        async with run_stack(TARGET, None, wire=True) as stack:
            asked = [request(rule, prompt, LONGEST) for prompt in range(NUM_PROMPTS)]
            _EXPECTED[key] = list(await asyncio.gather(*[stack.generate(**each) for each in asked]))
    return _EXPECTED[key]


async def play(
    stack: Stack,
    rule: Rule,
    expected: list[GenerationResult],
    chance: random.Random,
    num_requests: int,
    shortest: int = 1,
) -> None:
    """Requests of several users, of which some leave early; the tokens are the expected ones."""
    left = num_requests

    async def ask() -> None:
        prompt, length = chance.randrange(len(expected)), chance.randrange(shortest, LONGEST + 1)
        asked = request(rule, prompt, length)
        if chance.random() < 0.15:
            found, stream = list[int](), stack.stream(**asked)
            async for delta in stream:
                found += delta.token_ids
                if len(found) >= length // 2:
                    break
            await stream.aclose()
        else:
            asked["draft_ahead"] = chance.random() < 0.85
            found = list((await asyncio.wait_for(stack.generate(**asked), DEADLINE_S)).token_ids)
            assert len(found) == length
        assert found == list(expected[prompt].token_ids[: len(found)])

    async def user() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await ask()

    await asyncio.gather(*[user() for _ in range(chance.choice((1, 2, 5, 9)))])


async def play_seed(seed: int, near: Path, patch: pytest.MonkeyPatch, num_requests: int = NUM_REQUESTS) -> Faults:
    """One stack, whose settings and faults follow from the seed."""
    chance = random.Random(seed)
    mode, rule = chance.choice(("verdict", "chain", "chain", "auto")), chance.choice((GREEDY, COUPLED, COUPLED))
    if mode == "auto":
        patch.setattr(order, "TOKENS_OF_WINDOW", 4)
        patch.setattr(order, "FIRST_TRIAL_S", 0.0)
    if chance.random() < 0.6:
        patch.setattr(runner, "ModelRunner", LoopedRunner)
    pages = FEW_PAGES if chance.random() < 0.4 else {}
    settings: dict[str, Any] = {
        "draft_ahead": mode,
        "channels_between_hosts": True,
        "draft_timeout_ms": 60_000,
        "target_timeout_s": 60,
        "num_speculative_tokens": chance.choice((2, 4, 6)),
        "target_settings": pages,
        "draft_settings": pages,
    }
    messages = Messages(random.Random(seed + 1), is_wrong=chance.random() < 0.8)
    messages.install(patch)
    expected = await expected_of(rule)
    async with through_a_proxy(patch) as proxy, run_stack(TARGET, near, wire=True, **settings) as stack:
        await introduced(stack)
        faults = Faults(stack, proxy, random.Random(seed + 2), kills=chance.random() < 0.5)
        happening = asyncio.ensure_future(faults.play())
        try:
            await play(stack, rule, expected, chance, num_requests)
        finally:
            faults.is_over = True
            await happening
        await left_nothing(stack)
    return faults


@pytest.mark.parametrize("seed", range(2))
async def test_random_faults_change_no_token(seed: int, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = await play_seed(seed, near, monkeypatch)
    assert faults.happened


async def test_under_rejection_faults_of_the_path_change_no_draw(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of drafting in turn: no push, proposal or verdict on its way decides what is drawn."""
    monkeypatch.setattr(runner, "ModelRunner", LoopedRunner)
    chance = random.Random(1)
    async with run_stack(TARGET, near, wire=True, draft_ahead="in_turn", **PATIENT) as stack:
        expected = [await stack.generate(**request(SAMPLED, prompt, LONGEST)) for prompt in range(3)]
    Messages(random.Random(2)).install(monkeypatch)
    ahead: dict[str, Any] = {"draft_ahead": "chain", "channels_between_hosts": True, **PATIENT}
    async with through_a_proxy(monkeypatch) as proxy, run_stack(TARGET, near, wire=True, **ahead) as stack:
        await introduced(stack)
        faults = Faults(stack, proxy, random.Random(3), kills=False)
        happening = asyncio.ensure_future(faults.play())
        try:
            await play(stack, SAMPLED, expected, chance, 6, shortest=LONGEST)
        finally:
            faults.is_over = True
            await happening
        await left_nothing(stack)
