"""A draft's prefix cache: sessions begin after what is cached and propose the same. Drafted tokens are not cached."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Proposal
from outrider.types import SamplingParams, SparseEvidence
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_draft.service import build_model_core
from tests.support.core_driver import GREEDY, Driver, extend_item, open_session

TEXT = [(7 * position) % 250 for position in range(60)]


def opened(session: int = 0, **changes: Any) -> Any:
    return open_session(session, **{"prompt_length": 30, "max_length": 90, "num_token_ids": 257, **changes})


@pytest.fixture
def driver(proposer: ModelProposer) -> Driver:
    return Driver(build_model_core(proposer, max_batched_tokens=16))


def ask(driver: Driver, session: int, text: list[int], length: int = 4, **changes: Any) -> tuple[Proposal, int]:
    """The proposal after a whole text, and how much of the text was cached."""
    proposal = driver.one(opened(session, **changes), extend_item(session, 2, text, length))
    assert isinstance(proposal, Proposal)
    return proposal, driver.opened[-1].num_cached_tokens


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0)])
def test_proposals_are_the_same_with_a_cached_prompt(driver: Driver, sampling: SamplingParams) -> None:
    first, cached = ask(driver, 0, TEXT, sampling=sampling)
    assert cached == 0
    second, cached = ask(driver, 1, TEXT, sampling=sampling)
    assert cached == 56
    assert first.token_ids == second.token_ids
    if isinstance(first.evidence, SparseEvidence):
        assert isinstance(second.evidence, SparseEvidence)
        np.testing.assert_allclose(np.sort(first.evidence.probs), np.sort(second.evidence.probs), atol=1e-5)


def test_a_prefill_alone_is_cached(driver: Driver) -> None:
    assert ask(driver, 0, TEXT, 0)[1] == 0
    assert ask(driver, 1, TEXT, 0)[1] == 56


def test_drafted_tokens_are_never_found(driver: Driver, runner: ModelRunner) -> None:
    proposal, _ = ask(driver, 0, TEXT[:30], 12)
    assert len(proposal.token_ids) == 12
    text = [*TEXT[:30], *proposal.token_ids]
    assert ask(driver, 1, text, 0, cache_salt="other")[1] == 0
    assert len(runner.sequences.prefix_cache or ()) == 7 + len(text) // 4
    assert ask(driver, 2, text, 0)[1] == 28
    driver.run(extend_item(0, 3, [*text, 5], 0, num_kept_tokens=41))
    assert ask(driver, 3, [*text, 6, 7, 8], 0)[1] == 40


def test_salts_share_no_page(driver: Driver) -> None:
    for session, salt in enumerate(("one", "two", "")):
        assert ask(driver, session, TEXT, cache_salt=salt)[1] == 0
    assert ask(driver, 3, TEXT, cache_salt="two")[1] == 56
