"""Preemption in a target: when pages run out the youngest session ends, wherever it is, and the oldest goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from outrider.model_executor.model_runner import ModelRunner
from outrider.ports import Preempted, Refused, Release, Score, Scores, SessionFailed
from outrider.types import TokenScores
from outrider_target.service import build_core
from tests.support.async_target import AsyncTargetExecutor, lookahead_core
from tests.support.core_driver import Driver, open_session, score_item, with_credit
from tests.support.tiny_models import cached_tiny_model

PAGE = 4
NUM_IDS = 257


def make_runner(num_pages: int, **options: Any) -> ModelRunner:
    folder = cached_tiny_model("llama", seed=1)
    runner = ModelRunner.load(folder, dtype="float32", page_size=PAGE, num_pages=num_pages, **options)
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))
    return runner


def opened(session: int, *, arrival_ns: int, max_length: int = 60, **changes: Any) -> Any:
    return open_session(
        session, prompt_length=8, max_length=max_length, num_token_ids=NUM_IDS, arrival_ns=arrival_ns, **changes
    )


def prompt(session: int, length: int = 8) -> list[int]:
    return [(31 * session + 7 * position) % 250 for position in range(length)]


@dataclass
class Coordinator:
    """Greedy sessions without drafts; a session that was preempted or refused is opened anew when it is told to."""

    driver: Driver
    texts: dict[int, list[int]] = field(default_factory=dict)
    arrivals: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    """Preempted or refused, in this order."""
    generation: int = 0
    max_length: int = 60

    def begin(self, session: int, text: list[int], *, arrival_ns: int) -> None:
        self.texts[session], self.arrivals[session] = text, arrival_ns
        self.open_again(session)

    def open_again(self, session: int) -> None:
        self.generation += 1
        arrival_ns = self.arrivals[session]
        command = opened(session, arrival_ns=arrival_ns, generation=self.generation, max_length=self.max_length)
        self.driver.send(command)
        self.held[session] = 0
        self.ask(session)

    def ask(self, session: int) -> None:
        self.generation += 1
        item = score_item(session, self.generation, self.texts[session], num_kept_tokens=self.held[session])
        self.driver.send(*with_credit(item))

    def step(self) -> None:
        for event in self.driver.step():
            self.take(event)

    def take(self, event: Any) -> None:
        if isinstance(event, Preempted | Refused):
            self.lost.append(event.session)
            return
        assert isinstance(event, Scores), event
        assert isinstance(event.form, TokenScores)
        text = self.texts[event.session]
        self.held[event.session] = len(text)
        text.append(event.form.token_ids[0])
        if len(text) < self.max_length:
            self.ask(event.session)

    def run(self) -> None:
        """Run until all have all their tokens: lost sessions are opened anew, the oldest first."""
        for _ in range(10_000):
            if not self.driver.core.has_work:
                if not self.lost:
                    return
                waiting = sorted(set(self.lost), key=lambda session: self.arrivals[session])
                self.lost.clear()
                for session in [one for one in self.texts if len(self.texts[one]) >= self.max_length]:
                    self.generation += 1
                    self.driver.send(Release(session, self.generation))
                for session in waiting:
                    self.open_again(session)
            self.step()
        raise AssertionError("sessions that do not get through")


def truth(text: list[int], length: int) -> list[int]:
    """The greedy continuation by a target that has room for everything."""
    alone = Coordinator(Driver(build_core(make_runner(256))), max_length=length)
    alone.begin(0, list(text), arrival_ns=1)
    alone.run()
    return alone.texts[0]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("flies", [True, False])
def test_all_get_their_own_tokens_from_a_pool_for_one_and_a_half(flies: bool, prefix_caching: bool) -> None:
    runner = make_runner(24, prefix_caching=prefix_caching)
    core: Any = lookahead_core(AsyncTargetExecutor(runner), max_batched_tokens=16) if flies else build_core(runner)
    running = Coordinator(Driver(core))
    for session in range(4):
        running.begin(session, prompt(session, 8 + 5 * session), arrival_ns=10 - session)
    running.run()
    assert core.stats.num_preempted
    for session in range(4):
        assert running.texts[session] == truth(prompt(session, 8 + 5 * session), 60), session
    core.drop_link(0)
    runner.sequences.check_integrity()
    assert runner.sequences.pool.num_used == 0


def test_the_youngest_by_arrival_is_preempted_and_the_oldest_goes_on() -> None:
    runner = make_runner(16)
    running = Coordinator(Driver(build_core(runner)))
    running.begin(0, prompt(0), arrival_ns=3)
    running.begin(1, prompt(1), arrival_ns=1)
    running.begin(2, prompt(2), arrival_ns=2)
    while running.driver.core.has_work:
        running.step()
    assert running.lost == [0, 2]
    assert len(running.texts[1]) == 60


def test_a_session_is_preempted_in_the_middle_of_its_prefill() -> None:
    """An older session comes meanwhile, as one that is rebuilt would."""
    runner = make_runner(16)
    driver = Driver(build_core(runner, max_batched_tokens=8))
    running = Coordinator(driver)
    running.begin(0, prompt(0, 50), arrival_ns=5)
    running.step()
    session = driver.core.sessions.get(0, 0)
    assert session is not None
    assert 0 < session.sequence.length < 50
    running.begin(1, prompt(1, 40), arrival_ns=1)
    while driver.core.has_work:
        running.step()
    assert running.lost == [0]
    assert len(running.texts[1]) == 60
    assert driver.core.sessions.get(0, 0) is None


def test_a_session_is_preempted_while_steps_are_computed_ahead_of_it() -> None:
    runner = make_runner(20)
    core = lookahead_core(AsyncTargetExecutor(runner))
    running = Coordinator(Driver(core))
    running.begin(0, prompt(0), arrival_ns=5)
    for _ in range(60):
        running.step()
        if core.stats.num_lookahead_used > 3:
            break
    assert core.stats.num_lookahead_used > 3
    running.begin(1, prompt(1, 50), arrival_ns=1)
    running.run()
    assert core.stats.num_preempted
    for session, length in ((0, 8), (1, 50)):
        assert running.texts[session] == truth(prompt(session, length), 60)


def test_steps_that_were_not_asked_for_preempt_nobody() -> None:
    runner = make_runner(6)
    core = lookahead_core(AsyncTargetExecutor(runner))
    driver = Driver(core)
    text = prompt(0)
    driver.run(opened(1, arrival_ns=9, max_length=16), score_item(1, 2, prompt(1, 12)))
    held, generation = 0, 2
    driver.send(opened(0, arrival_ns=1, max_length=24))
    while len(text) < 12:
        driver.send(*with_credit(score_item(0, generation, text, num_kept_tokens=held)))
        events: list[Any] = []
        while not events:
            events = driver.step()
        while core.has_work:
            assert not driver.step()
        held, generation = len(text), generation + 1
        text.append(events[0].form.token_ids[0])
    assert core.num_pages_free == 0
    assert core.stats.num_preempted == 0
    assert core.stats.num_lookahead_used


def test_a_new_session_without_room_for_its_text_is_refused_and_harms_nobody() -> None:
    runner = make_runner(16)
    driver = Driver(build_core(runner))
    driver.run(opened(0, arrival_ns=1), score_item(0, 2, prompt(0, 40)))
    refused = driver.one(opened(1, arrival_ns=2), score_item(1, 2, prompt(1, 40)))
    assert isinstance(refused, Refused)
    assert refused.retry_after_ms > 0
    assert driver.core.sessions.get(0, 1) is None
    kept = driver.one(Score(0, 3, 40, score_item(0, 3, prompt(0, 40), num_kept_tokens=40).prefix_hash, (5,)))
    assert isinstance(kept, Scores)


def test_what_does_not_fit_an_empty_pool_is_refused_at_once() -> None:
    driver = Driver(build_core(make_runner(8)))
    failed = driver.one(opened(0, arrival_ns=1, max_length=33))
    assert isinstance(failed, SessionFailed)
    assert failed.field == "max_length"
    assert "must be at most 32" in failed.message
    assert isinstance(driver.one(opened(1, arrival_ns=1, max_length=32), score_item(1, 2, prompt(1, 32))), Scores)


def test_short_answers_do_not_take_the_pages_of_long_ones() -> None:
    """60 requests of 199 tokens, each of which might take 4,000, in a pool of 16,000 tokens."""
    folder = cached_tiny_model("llama", seed=1, max_position_embeddings=8192)
    runner = ModelRunner.load(folder, dtype="float32", page_size=16, num_pages=1000)
    driver = Driver(build_core(runner, max_batched_tokens=2048))
    sessions = range(60)
    for session in sessions:
        driver.send(opened(session, arrival_ns=session, max_length=4_000))
        driver.send(score_item(session, 2, prompt(session, 199)))
    events = []
    while driver.core.has_work:
        events += driver.step()
    assert len(events) == 60
    assert all(isinstance(event, Scores) for event in events)
    assert driver.core.num_sessions == 60
