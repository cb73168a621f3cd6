"""A draft that lies about its probabilities: what it can do under rejection, and that it can do nothing when drafts are
not trusted.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from outrider.config import CoordinatorSettings
from outrider.generation import GenerationRequest
from outrider.types import AcceptanceMethod, SamplingParams, SparseEvidence
from outrider_coordinator.service import Coordinator
from tests.support.coordinator_stats import stats_of
from tests.support.scripted_ports import ToyDraft, ToyTarget

VOCAB_SIZE = 12
CHOSEN, SHARE = 7, 0.014
LENGTH = 41
NUM_REQUESTS = 60
TARGET_ROW = np.full(VOCAB_SIZE, (1 - SHARE) / (VOCAB_SIZE - 1))
TARGET_ROW[CHOSEN] = SHARE
DRAFT_ROW = np.full(VOCAB_SIZE, 0.1 / (VOCAB_SIZE - 1))
DRAFT_ROW[CHOSEN] = 0.9


def belittled(evidence: SparseEvidence) -> SparseEvidence:
    """The chosen token is said to be as unlikely as the target finds it."""
    probs = np.where(evidence.token_ids == CHOSEN, SHARE, evidence.probs)
    rest = np.where(evidence.token_ids == CHOSEN, 0, probs)
    rows = np.repeat(np.arange(evidence.counts.size), evidence.counts)
    scale = (1 - SHARE) / np.bincount(rows, rest, evidence.counts.size)[rows]
    lied = np.where(evidence.token_ids == CHOSEN, SHARE, rest * scale).astype(np.float32)
    return replace(evidence, probs=lied)


async def share_of_chosen(method: AcceptanceMethod, *, trusted: bool) -> tuple[float, float]:
    """Share of the chosen token after the first, which no draft proposes; and the drafted tokens a request."""
    target = ToyTarget(lambda tokens: TARGET_ROW, VOCAB_SIZE)
    draft = ToyDraft(lambda tokens: DRAFT_ROW, VOCAB_SIZE, misreport=belittled)
    settings = CoordinatorSettings.model_validate({"draft_length": "fixed", "trusted_drafts": trusted})
    coordinator = Coordinator(target, draft, settings)
    await coordinator.start()
    try:
        found = await asyncio.gather(*(_generate(coordinator, method, seed) for seed in range(NUM_REQUESTS)))
        return float(np.mean(np.concatenate(found) == CHOSEN)), stats_of(coordinator).spec_stats.num_draft_tokens
    finally:
        await coordinator.close()


async def _generate(coordinator: Coordinator, method: AcceptanceMethod, seed: int) -> list[int]:
    request = GenerationRequest(
        prompt_token_ids=(1, 2, 3),
        max_tokens=LENGTH,
        seed=seed,
        sampling=SamplingParams(temperature=1.0),
        acceptance_method=method,
    )
    return [token_id async for delta in coordinator.generate_stream(request) for token_id in delta.token_ids][1:]


def is_of_target(share: float) -> bool:
    """True within five standard deviations of what the target alone gives."""
    deviation = float(np.sqrt(SHARE * (1 - SHARE) / (NUM_REQUESTS * (LENGTH - 1))))
    return abs(share - SHARE) < 5 * deviation


async def test_a_draft_that_is_trusted_can_raise_the_share_of_a_token_unseen() -> None:
    share, num_drafted = await share_of_chosen(AcceptanceMethod.REJECTION, trusted=True)
    assert share > 10 * SHARE and num_drafted > 0


@pytest.mark.parametrize("method", [AcceptanceMethod.REJECTION, AcceptanceMethod.TYPICAL])
async def test_one_that_is_not_trusted_drafts_nothing_that_its_evidence_decides(method: AcceptanceMethod) -> None:
    share, num_drafted = await share_of_chosen(method, trusted=False)
    assert is_of_target(share) and num_drafted == 0


@pytest.mark.parametrize("trusted", [False, True])
async def test_coupled_output_is_the_targets_with_any_draft(trusted: bool) -> None:
    share, num_drafted = await share_of_chosen(AcceptanceMethod.COUPLED, trusted=trusted)
    assert is_of_target(share) and num_drafted > 0
