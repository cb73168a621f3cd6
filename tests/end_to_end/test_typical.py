"""Typical acceptance follows its formula, position by position, against logits that transformers computed.

Every verdict of the real loop is looked at: which draft tokens were asked about, and which tokens came of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from outrider.ports import Scores
from outrider.types import SamplingParams
from tests.support.service_rig import Run, ServiceRig
from tests.support.small_models import SmallModels, build_small_models
from tests.support.statistics import Doubles, reference_logits, sampled_probs

VOCAB_SIZE = 24
NUM_REQUESTS = 15
MAX_TOKENS = 24
NEAR = 1e-4
"""Closer to the bound than this share of it, rounding may decide either way; such a position is not judged here."""
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 10}, {"temperature": 1.3}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SmallModels:
    return build_small_models(
        tmp_path_factory.mktemp("models"), vocab_size=VOCAB_SIZE, num_hidden_layers=2, initializer_range=0.35
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One verdict: the output before it, and what was to be judged."""

    num_output: int
    draft_token_ids: tuple[int, ...]


def prompt_of(index: int) -> list[int]:
    return [(index + 7 * i) % VOCAB_SIZE for i in range(3 + index)]


def request(index: int) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt_of(index),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "seed": index,
        "num_speculative_tokens": 1 + index % 5,
        **SAMPLINGS[index % 3],
    }


def check_step(step: Step, index: int, output: list[int], logits: Doubles, bounds: dict[str, float]) -> tuple[int, str]:
    """Hold one step against the formula; (accepted tokens, how it ended). ``logits``: after each token of the text."""
    sampling = SamplingParams(**SAMPLINGS[index % 3])
    start = len(prompt_of(index)) + step.num_output  # where the first draft token stands
    for place, draft_id in enumerate(step.draft_token_ids):
        probs = sampled_probs(logits[start + place - 1], sampling)
        entropy = -(probs * np.log(probs + 1e-5)).sum()
        bound = min(bounds["posterior_threshold"], bounds["posterior_alpha"] * np.exp(-entropy))
        if abs(probs[draft_id] - bound) < NEAR * bound:
            return place, "near"
        emitted = output[step.num_output + place]
        if not probs[draft_id] > bound:
            assert emitted == probs.argmax(), "the target's likeliest stands where a draft token was rejected"
            return place, "rejected"
        assert emitted == draft_id, "a draft token that the target finds likely enough was not kept"
    count = len(step.draft_token_ids)
    bonus = output[step.num_output + count]
    assert sampled_probs(logits[start + count - 1], sampling)[bonus] > 0
    return count, "bonus"


@pytest.mark.parametrize("draft", ["good", "bad", "ngram"])
@pytest.mark.parametrize(
    ("threshold", "alpha"), [(0.09, 0.3), (0.3, 2.0), (0.02, 0.05), (1.0, 0.6), (0.0, 0.3)], ids=str
)
def test_acceptance_follows_the_formula(models: SmallModels, draft: str, threshold: float, alpha: float) -> None:
    bounds: dict[str, Any] = {"posterior_threshold": threshold, "posterior_alpha": alpha}
    rig = ServiceRig(models.target, models.draft(draft), acceptance_method="typical", **bounds)
    steps: dict[int, list[Step]] = {}

    def watch(run: Run, command: Any, event: Any) -> None:
        assert isinstance(event, Scores)
        steps.setdefault(event.session, []).append(Step(len(run.token_ids), command.draft_token_ids))

    rig.watch_target = watch
    outputs = rig.generate(request(index) for index in range(NUM_REQUESTS))
    texts = [[*prompt_of(index), *output] for index, output in enumerate(outputs)]
    counted = {"rejected": 0, "bonus": 0, "near": 0, "accepted": 0}
    for index, logits in enumerate(reference_logits(models.target, texts)):
        mine = steps[index + 1]
        assert [step.num_output for step in mine] == sorted({step.num_output for step in mine})
        ends = [*(step.num_output for step in mine[1:]), MAX_TOKENS]
        for step, end in zip(mine, ends, strict=True):
            accepted, ending = check_step(step, index, outputs[index], logits, bounds)
            counted[ending] += 1
            counted["accepted"] += accepted
            assert ending == "near" or end == step.num_output + accepted + 1
    assert counted["near"] <= 2
    assert counted["accepted"] > 0
    assert counted["bonus"] > 0 or draft != "good"
    assert counted["rejected"] > 0 or draft == "good"
