"""A target's prefix cache: what a new session need not compute, and that its scores do not tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import Opened, Release, Scores
from outrider_target.service import build_core
from tests.support.core_driver import Driver, open_session, score_item, with_credit

TEXT = [(7 * position) % 250 for position in range(60)]
NUM_IDS, PAGE = 257, 4


def opened(session: int = 0, **changes: Any) -> Any:
    return open_session(session, **{"prompt_length": 30, "max_length": 80, "num_token_ids": NUM_IDS, **changes})


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    return Driver(build_core(runner, max_batched_tokens=16))


def num_computed(driver: Driver, *commands: Any) -> tuple[Scores, int]:
    """The answer, and the tokens that forwards computed for it."""
    counts: list[int] = []
    executor: Any = driver.core.executor
    forward = executor.runner.forward_batch

    def counting(batch: RowBatch, *given: Any, **more: Any) -> Any:
        counts.append(int(batch.counts.sum()))
        return forward(batch, *given, **more)

    executor.runner.forward_batch = counting
    scores = driver.one(*commands)
    executor.runner.forward_batch = forward
    assert isinstance(scores, Scores)
    return scores, sum(counts)


def ask(driver: Driver, session: int, text: list[int], **changes: Any) -> tuple[Scores, int, int]:
    """The answer to a whole text, the tokens computed, and those that were cached."""
    scores, computed = num_computed(driver, opened(session, **changes), score_item(session, 2, text))
    assert driver.opened[-1].session == session
    return scores, computed, driver.opened[-1].num_cached_tokens


def assert_same(first: Scores, second: Scores) -> None:
    assert first.form == second.form
    for one, other in zip(first.logprobs, second.logprobs, strict=True):
        assert one.top_token_ids.tolist() == other.top_token_ids.tolist()
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-5)


def test_a_cached_prompt_is_not_computed_again_and_the_scores_are_the_same(driver: Driver) -> None:
    first, computed, cached = ask(driver, 0, TEXT[:30], num_logprobs=5)
    assert (computed, cached) == (30, 0)
    second, computed, cached = ask(driver, 1, TEXT[:30], num_logprobs=5)
    assert (computed, cached) == (2, 28)
    assert_same(first, second)
    longer, computed, cached = ask(driver, 2, TEXT, num_logprobs=5)
    assert (computed, cached) == (32, 28)
    fresh, _, cached = ask(driver, 3, TEXT, num_logprobs=5, cache_salt="other")
    assert cached == 0
    assert_same(longer, fresh)


def test_a_session_that_has_ended_leaves_its_prompt_to_others(driver: Driver, runner: ModelRunner) -> None:
    ask(driver, 0, TEXT)
    driver.run(Release(0, 3))
    assert runner.sequences.pool.num_used == 0
    _, computed, cached = ask(driver, 1, TEXT)
    assert (computed, cached) == (4, 56)


def test_a_session_opened_anew_takes_up_its_own_text(driver: Driver) -> None:
    first, _, _ = ask(driver, 0, TEXT)
    events = driver.run(opened(generation=5), score_item(0, 6, TEXT))
    assert driver.opened[-1] == Opened(0, 5, 56)
    assert events == [replace(first, generation=6)]


def test_drafted_tokens_are_never_found(driver: Driver) -> None:
    """Accepted ones are, once an item has kept them."""
    drafts = TEXT[30:42]
    driver.run(opened(), score_item(0, 2, TEXT[:30], drafts))
    assert ask(driver, 1, [*TEXT[:30], 1, 2, 3])[2] == 28
    kept = [*TEXT[:35], 1]
    driver.run(score_item(0, 3, kept, num_kept_tokens=35))
    assert ask(driver, 2, TEXT)[2] == 32
    assert ask(driver, 3, [*TEXT[:35], 1, 2])[2] == 36


def test_the_kv_of_tokens_computed_ahead_and_not_asked_for_is_never_found(runner: ModelRunner) -> None:
    driver = Driver(build_core(runner, max_batched_tokens=16, computes_ahead=True))
    tokens, held = TEXT[:30], 0
    for generation in range(2, 8):
        item = score_item(0, generation, tokens, num_kept_tokens=held)
        driver.send(*([opened()] if generation == 2 else []), *with_credit(item))
        events: list[Any] = []
        while not events:
            events = driver.step()
        while driver.core.has_work:
            driver.step()
        held, tokens = len(tokens), [*tokens, *events[0].form.token_ids]
    assert runner.sequences.pool.num_used * PAGE > len(tokens)
    session = driver.core.sessions.get(0, 0)
    assert session is not None and session.sequence.length > held
    assert len(runner.sequences.prefix_cache or ()) == held // PAGE


def test_a_prompt_whose_logprobs_are_wanted_is_computed(driver: Driver) -> None:
    ask(driver, 0, TEXT[:30])
    wanted, computed, cached = ask(driver, 1, TEXT[:30], num_prompt_logprobs=2)
    assert (computed, cached) == (30, 0)
    assert len(wanted.prompt_logprobs) == 29
    fresh, _, _ = ask(driver, 2, TEXT[:30], num_prompt_logprobs=2, cache_salt="other")
    for one, other in zip(wanted.prompt_logprobs, fresh.prompt_logprobs, strict=True):
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-5)


def test_salts_share_no_page(driver: Driver, runner: ModelRunner) -> None:
    for session, salt in enumerate(("one", "two", "")):
        assert ask(driver, session, TEXT, cache_salt=salt)[1:] == (60, 0)
    assert runner.sequences.pool.num_used == 3 * 15
    assert ask(driver, 3, TEXT, cache_salt="two")[2] == 56


def test_sessions_over_one_prompt_share_its_pages(driver: Driver, runner: ModelRunner) -> None:
    ask(driver, 0, TEXT)
    of_one = runner.sequences.pool.num_used
    for session in range(1, 8):
        ask(driver, session, [*TEXT[:56], session])
    assert runner.sequences.pool.num_used == of_one + 7


def test_switched_off_nothing_is_cached(folder: Path) -> None:
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=64, prefix_caching=False)
    driver = Driver(build_core(runner))
    assert ask(driver, 0, TEXT)[1:] == (60, 0)
    assert ask(driver, 1, TEXT)[1:] == (60, 0)


def test_rewinding_into_a_cached_page_leaves_it_to_others(driver: Driver) -> None:
    ask(driver, 0, TEXT)
    ask(driver, 1, TEXT)
    rewound, _ = num_computed(driver, score_item(1, 3, [*TEXT[:45], 9, 9, 9, 9], num_kept_tokens=45))
    fresh, _, _ = ask(driver, 2, [*TEXT[:45], 9, 9, 9, 9], cache_salt="other")
    assert rewound.form == fresh.form
    again, _, cached = ask(driver, 3, TEXT)
    assert cached == 56
    assert again.form == ask(driver, 4, TEXT, cache_salt="third")[0].form
