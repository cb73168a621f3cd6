"""Batching and fairness, in counts of forwards."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Scores
from outrider_target.service import build_core
from tests.support.core_driver import Driver, open_session, score_item
from tests.support.tiny_models import cached_tiny_model

NUM_IDS = 257
NUM_RUNNING = 16


def opened(session: int, **changes: Any) -> Any:
    return open_session(session, **{"prompt_length": 4, "max_length": 200, "num_token_ids": NUM_IDS, **changes})


@pytest.fixture
def long_runner() -> ModelRunner:
    folder = cached_tiny_model("llama", seed=1, max_position_embeddings=4200)
    return ModelRunner.load(folder, dtype="float32", page_size=16, num_pages=600)


class Running:
    """Sessions that decode in lockstep, four wrong drafts a step."""

    def __init__(self, driver: Driver, count: int) -> None:
        self.driver = driver
        self.tokens = {session: [session + 1, 2, 3, 4] for session in range(count)}
        self.held = dict.fromkeys(self.tokens, 0)
        self.generation = 1
        driver.send(*[opened(session) for session in self.tokens])

    def send(self) -> None:
        self.generation += 1
        self.driver.send(
            *[
                score_item(session, self.generation, tokens, [9, 8, 7, 6], num_kept_tokens=self.held[session])
                for session, tokens in self.tokens.items()
            ]
        )

    def take(self, events: list[Any]) -> int:
        mine = [event for event in events if event.session in self.tokens]
        for event in mine:
            tokens = self.tokens[event.session]
            self.held[event.session] = len(tokens)
            tokens.append(event.form.token_ids[0])
        return len(mine)


def test_sixteen_running_sessions_share_one_forward_a_step(long_runner: ModelRunner) -> None:
    driver = Driver(build_core(long_runner))
    running = Running(driver, NUM_RUNNING)
    for step in range(1, 6):
        running.send()
        assert running.take(driver.step()) == NUM_RUNNING
        assert long_runner.num_forwards == step
    assert not driver.core.has_work


def test_running_sessions_lose_no_forward_to_a_long_prefill(long_runner: ModelRunner) -> None:
    driver = Driver(build_core(long_runner, max_batched_tokens=512, max_mixed_prefill_tokens=200))
    running = Running(driver, NUM_RUNNING)
    prompt = [(i * 37) % NUM_IDS for i in range(4000)]
    driver.send(opened(99, prompt_length=4000, max_length=4100), score_item(99, 2, prompt))
    answers: list[Any] = []
    while not answers:
        running.send()
        events = driver.step()
        assert running.take(events) == NUM_RUNNING  # a gap of one forward, never more
        answers = [event for event in events if event.session == 99]
    assert isinstance(answers[0], Scores)
    assert long_runner.num_forwards == 4000 // 200


def test_a_long_prefill_does_not_starve_short_ones(long_runner: ModelRunner) -> None:
    driver = Driver(build_core(long_runner, max_batched_tokens=128))
    prompt = [(i * 37) % NUM_IDS for i in range(4000)]
    driver.send(opened(99, prompt_length=4000, max_length=4100), score_item(99, 2, prompt))
    driver.step()
    driver.send(opened(1, prompt_length=150), score_item(1, 2, prompt[:150]))
    answered: list[int] = []
    num_forwards = 0
    while 1 not in answered:
        num_forwards += 1
        answered += [event.session for event in driver.step()]
    assert num_forwards == 2  # the short one goes first
    assert 99 not in answered


def test_prefills_too_many_for_one_forward_take_turns(long_runner: ModelRunner) -> None:
    driver = Driver(build_core(long_runner, max_batched_tokens=16))
    sessions = range(3)
    driver.send(*[opened(i, prompt_length=64) for i in sessions], *[score_item(i, 2, [1] * 64) for i in sessions])
    fed: list[int] = []
    for _ in sessions:
        driver.step()
        texts = [driver.core.sessions.get(0, i) for i in sessions]
        fed.append(sum(text is not None and text.sequence.length > 0 for text in texts))
    assert fed == [1, 2, 3]


def test_sessions_of_all_links_go_into_one_forward(long_runner: ModelRunner) -> None:
    core = build_core(long_runner)
    drivers = [Driver(core, link_id) for link_id in range(3)]
    for driver in drivers:
        driver.send(opened(0), score_item(0, 2, [1, 2, 3]))
    batches = core.step()
    assert sorted(link_id for link_id, batch in batches if batch.report is not None) == [0, 1, 2]
    assert long_runner.num_forwards == 1
    assert {batch.report.batch_size for _, batch in batches if batch.report} == {3}
