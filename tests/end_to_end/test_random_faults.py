"""Drafting ahead under random faults of its channel, the path of that, both services and their pages."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.generation import GenerationResult
from outrider.model_executor.distributed import runner
from outrider.types import SamplingParams
from outrider_coordinator.speculation import order
from tests.end_to_end.random_faults import Faults, Messages, left_nothing, through_a_proxy
from tests.end_to_end.test_direct_proposals import COUPLED, GREEDY, PATIENT, SAMPLED, TARGET, introduced
from tests.end_to_end.test_distribution import LENGTH
from tests.end_to_end.test_draft_ahead import steps
from tests.end_to_end.waiting import DEADLINE_S
from tests.support.coordinator_stats import stats_of
from tests.support.draft_loops import LoopedRunner
from tests.support.eagle3 import build_eagle3
from tests.support.small_models import PROMPT, VOCAB_SIZE, build_small_models
from tests.support.stack import Stack, run_stack
from tests.support.statistics import cells, chi_square_p, joint_law

NUM_PROMPTS, LONGEST, NUM_REQUESTS = 12, 90, 16
FEW_PAGES: dict[str, Any] = {"page_size": 4, "num_pages": 110}
SEEDS = (4, 6, 38, 58, 23)
"""The first faults of a service that four of them draw are a hang, lost links and outages; the last drafts by a head.
"""
NUM_DRAWS, LEAST_P, CAUGHT_P = 400, 1e-6, 1e-12
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


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that reads hidden states."""
    return build_eagle3(tmp_path_factory.mktemp("head"), max_position_embeddings=1024)


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
    is_enough: Callable[[], object] = lambda: True,
) -> None:
    """Requests of several users, of which some leave early, until it is enough; the tokens are the expected ones."""
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
        while left > 0 or not is_enough():
            left -= 1
            await ask()

    await asyncio.gather(*[user() for _ in range(chance.choice((1, 2, 5, 9)))])


@dataclass(frozen=True)
class Plan:
    """Settings and faults of one stack."""

    mode: str
    rule: Rule
    is_looped: bool
    has_few_pages: bool
    draft_length: int
    is_wrong: bool
    """True: messages of the channel are changed."""
    kills: bool
    reads_states: bool
    """True: the draft is a head."""

    @property
    def changed_kinds(self) -> set[str]:
        """Kinds of messages of which some are changed for certain: a draft that reads states pushes nothing."""
        if not self.is_wrong:
            return set()
        return {"proposals", "verdicts", *(["pushes"] if self.mode == "chain" and not self.reads_states else [])}


def drawn(seed: int) -> Plan:
    """The plan that follows from a seed."""
    chance = random.Random(seed)
    return Plan(
        mode=chance.choice(("verdict", "chain", "chain", "auto")),
        rule=chance.choice((GREEDY, COUPLED, COUPLED)),
        is_looped=chance.random() < 0.6,
        has_few_pages=chance.random() < 0.4,
        draft_length=chance.choice((2, 4, 6)),
        is_wrong=chance.random() < 0.8,
        kills=chance.random() < 0.5,
        reads_states=chance.random() < 0.3,
    )


async def play_plan(plan: Plan, seed: int, near: Path, head: Path, patch: pytest.MonkeyPatch) -> Faults:
    """One stack until its requests have ended and faults have happened: of a service, and of each kind of message,
    where the plan has these.
    """
    if plan.mode == "auto":
        patch.setattr(order, "TOKENS_OF_WINDOW", 4)
        patch.setattr(order, "FIRST_TRIAL_S", 0.0)
    if plan.is_looped:
        patch.setattr(runner, "ModelRunner", LoopedRunner)
    pages = FEW_PAGES if plan.has_few_pages else {}
    method = {"method": "eagle3", "target_model": str(TARGET)} if plan.reads_states else {}
    settings: dict[str, Any] = {
        "draft_ahead": plan.mode,
        "channels_between_hosts": True,
        "draft_timeout_ms": 60_000,
        "target_timeout_s": 60,
        "num_speculative_tokens": plan.draft_length,
        "target_settings": pages,
        "draft_settings": {**pages, **method},
    }
    messages = Messages(random.Random(seed + 1), is_wrong=plan.is_wrong)
    messages.install(patch)
    expected = await expected_of(plan.rule)
    draft = head if plan.reads_states else near
    async with through_a_proxy(patch) as proxy, run_stack(TARGET, draft, wire=True, **settings) as stack:
        await introduced(stack)
        faults = Faults(stack, proxy, random.Random(seed + 2), kills=plan.kills)
        happening = asyncio.ensure_future(faults.play())
        try:
            await play(
                stack,
                plan.rule,
                expected,
                random.Random(seed + 3),
                NUM_REQUESTS,
                is_enough=lambda: (
                    (faults.of_services if plan.kills else faults.happened) and messages.kinds >= plan.changed_kinds
                ),
            )
        finally:
            faults.is_over = True
            await happening
        await left_nothing(stack)
    return faults


def test_seeds_draw_every_kind_of_plan() -> None:
    plans = [drawn(seed) for seed in SEEDS]
    assert {plan.mode for plan in plans} == {"verdict", "chain", "auto"}
    drawn_kinds = [(plan.rule == GREEDY, plan.is_looped, plan.has_few_pages, plan.reads_states) for plan in plans]
    for kinds in zip(*drawn_kinds, strict=True):
        assert set(kinds) == {False, True}
    assert all(plan.is_wrong and plan.kills for plan in plans)
    assert {"pushes" in plan.changed_kinds for plan in plans} == {False, True}


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_faults_change_no_token(
    seed: int, near: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = await play_plan(drawn(seed), seed, near, head, monkeypatch)
    assert faults.of_services


async def test_on_a_slow_path_no_draft_loses_a_session(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages are honest, but some come late: a push for another text of the same length is not taken."""
    monkeypatch.setattr(runner, "ModelRunner", LoopedRunner)
    expected, delays = await expected_of(COUPLED), random.Random(4)
    ahead: dict[str, Any] = {"draft_ahead": "chain", "channels_between_hosts": True, **PATIENT}
    async with through_a_proxy(monkeypatch) as proxy, run_stack(TARGET, near, wire=True, **ahead) as stack:
        await introduced(stack)
        proxy.delay_s = lambda: delays.random() * 0.003
        for seed, num_requests in ((5, 60), (3, 50)):  # of five users, then of two
            await play(stack, COUPLED, expected, random.Random(seed), num_requests)
        await left_nothing(stack)
        assert stats_of(stack.coordinator).spec_stats.num_draft_losses == 0


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


async def test_under_rejection_kills_keep_the_joint_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of faults choose which draws decide, and never their values."""
    monkeypatch.setattr(runner, "ModelRunner", LoopedRunner)
    models = build_small_models(tmp_path)
    Messages(random.Random(1)).install(monkeypatch)
    ahead: dict[str, Any] = {"draft_ahead": "chain", "channels_between_hosts": True, **PATIENT}
    asked = {"prompt_token_ids": PROMPT, "max_tokens": 6, "ignore_eos": True, "num_speculative_tokens": 1, **SAMPLED}
    outputs: list[list[int]] = []
    seeds = itertools.count()
    async with (
        through_a_proxy(monkeypatch) as proxy,
        run_stack(models.target, models.good, wire=True, **ahead) as stack,
    ):
        await introduced(stack)
        faults = Faults(stack, proxy, random.Random(2))

        async def user() -> None:
            while len(outputs) < NUM_DRAWS or not faults.of_services or not steps(stack, "used"):
                result = await asyncio.wait_for(stack.generate(**{**asked, "seed": next(seeds)}), DEADLINE_S)
                outputs.append(list(result.token_ids[:LENGTH]))

        happening = asyncio.ensure_future(faults.play())
        try:
            await asyncio.gather(user(), user())
        finally:
            faults.is_over = True
            await happening
        await left_nothing(stack)
    counts = cells(outputs, VOCAB_SIZE)
    law, other = (joint_law(models.target, PROMPT, SamplingParams(temperature=t), LENGTH) for t in (1.0, 0.6))
    assert chi_square_p(counts, law) > LEAST_P
    assert chi_square_p(counts, other) < CAUGHT_P
