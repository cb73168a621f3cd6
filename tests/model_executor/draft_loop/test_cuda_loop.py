"""Proposals of a GPU, drawn in loops, against the CPU's, drawn from logits token by token. Skipped without a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Extend, Open, Proposal
from outrider.types import AcceptanceMethod, SamplingParams, SparseEvidence
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from tests.support.core_driver import Driver, extend_item, open_session
from tests.support.tiny_models import cached_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

NUM_IDS = 257
RULES = DraftingRules(support_mass=0.99, support_limit=256)


def make_driver(architecture: str, device: str) -> tuple[Driver, ModelRunner]:
    runner = ModelRunner.load(
        cached_tiny_model(architecture, seed=1), device=device, dtype="float32", page_size=4, num_pages=600,
        drafting=RULES,
    )  # fmt: skip
    runner.warm_up()
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))  # a stale read would show
    proposer = ModelProposer(runner)
    assert (runner.drafting == RULES) == (device == "cuda")
    return Driver(build_model_core(proposer, max_batched_tokens=64)), runner


def opens(choose: random.Random, count: int) -> list[Open]:
    methods = [AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED, AcceptanceMethod.TYPICAL]
    return [
        open_session(
            session, prompt_length=5, max_length=100, num_token_ids=NUM_IDS, seed=choose.getrandbits(64),
            acceptance_method=choose.choice(methods),
            sampling=SamplingParams(
                temperature=choose.choice([0.0, 0.7, 1.0]), top_p=choose.choice([1.0, 0.9, 0.6]),
                top_k=choose.choice([0, 0, 20]), min_p=choose.choice([0.0, 0.0, 0.02]), min_tokens=9,
            ),
            eos_token_ids=(1, 2),
        )
        for session in range(count)
    ]  # fmt: skip


def check(found: Any, truth: Any) -> None:
    assert isinstance(found, Proposal)
    assert isinstance(truth, Proposal)
    assert replace(found, evidence=None) == replace(truth, evidence=None)
    assert type(found.evidence) is type(truth.evidence)
    if isinstance(found.evidence, SparseEvidence) and isinstance(truth.evidence, SparseEvidence):
        np.testing.assert_array_equal(found.evidence.counts, truth.evidence.counts)
        np.testing.assert_array_equal(np.sort(found.evidence.token_ids), np.sort(truth.evidence.token_ids))
        np.testing.assert_allclose(np.sort(found.evidence.probs), np.sort(truth.evidence.probs), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_two_hundred_rounds_of_drafting_and_rolling_back(architecture: str) -> None:
    (gpu, gpu_runner), (cpu, cpu_runner) = (make_driver(architecture, device) for device in ("cuda", "cpu"))
    choose = random.Random(7)
    texts: dict[int, list[int]] = {}
    held: dict[int, int] = {}
    generation = 1
    for _ in range(200):
        generation += 1
        commands: list[Any] = []
        if not texts or max(map(len, texts.values())) > 85:
            texts = {session: [choose.randrange(NUM_IDS) for _ in range(5)] for session in range(choose.randint(1, 16))}
            held = dict.fromkeys(texts, 0)
            commands += [replace(one, generation=generation) for one in opens(choose, len(texts))]
            generation += 1
        asked = choose.sample(sorted(texts), choose.randint(1, len(texts)))
        items: list[Extend] = []
        for session in asked:
            base = min(held[session], len(texts[session]) - 1)
            items.append(extend_item(session, generation, texts[session], choose.randint(0, 10), num_kept_tokens=base))
        answers = [{event.session: event for event in driver.run(*commands, *items)} for driver in (gpu, cpu)]
        assert set(answers[0]) == set(asked)
        for session in asked:
            found, truth = answers[0][session], answers[1][session]
            check(found, truth)
            kept = choose.randint(0, len(truth.token_ids))
            num_held = len(texts[session]) + max(0, len(truth.token_ids) - 1)
            texts[session] += [*truth.token_ids[:kept], choose.randrange(NUM_IDS)]
            held[session] = min(num_held, len(texts[session]) - 1)
        gpu_runner.sequences.check_integrity()
        for session in asked:
            ours, theirs = (driver.core.sessions.get(0, session) for driver in (gpu, cpu))
            assert ours is not None
            assert theirs is not None
            assert ours.sequence.token_ids == theirs.sequence.token_ids
    assert gpu_runner.sequences.pool.num_used == cpu_runner.sequences.pool.num_used


def test_a_proposal_is_one_launch() -> None:
    driver, runner = make_driver("llama", "cuda")
    tokens = [1, 2, 3, 4, 5]
    driver.run(*opens(random.Random(1), 3), *[extend_item(i, 2, tokens, 0) for i in range(3)])
    steps = driver.num_steps
    before = runner.num_forwards
    items = [extend_item(i, 3, [*tokens, 6], 4, num_kept_tokens=5) for i in range(3)]
    events = driver.run(*items)
    assert [len(event.token_ids) for event in events] == [4] * len(items)
    assert (driver.num_steps - steps, runner.num_forwards - before) == (1, 4)
