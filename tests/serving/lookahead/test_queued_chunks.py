"""Chunks of prompts that are queued behind each other: the answers are those of a target that queues none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.kernels.device_stream import Mark
from outrider.ports import Open, Preempted, Refused, Release, Scores
from outrider.serving.engine_core import EngineCore
from outrider.serving.session import Limits
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import TokenBudget
from tests.serving.lookahead.coordinating import Asked, reference, written
from tests.serving.lookahead.device import MAX_LENGTH, PAGE_SIZE, VOCAB_SIZE, Runner
from tests.support.async_target import AsyncTargetExecutor
from tests.support.core_driver import Driver, open_session, score_item

MARK = "outrider_target.scoring_forward.Mark"
CHUNK, MILLISECOND = 12, 1_000_000
LONG = [(7 * place) % (VOCAB_SIZE - 1) for place in range(40)]
OTHER = [(5 * place + 3) % (VOCAB_SIZE - 1) for place in range(40)]


@dataclass(frozen=True)
class EndOfForward:
    """Stand-in of ``Mark``."""

    rig: Rig
    number: int

    def is_reached(self) -> bool:
        return self.number < self.rig.num_ended

    def wait(self) -> None:
        assert self.is_reached()


class Rig:
    """A core whose device ends a forward when it is told to, and one link."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_pages: int = 60) -> None:
        self.runner, self.now_ms = Runner(num_pages), 0
        self.num_ended, marks = 0, itertools.count()

        self._patch = monkeypatch
        monkeypatch.setattr(MARK, lambda device: EndOfForward(self, next(marks)))
        executor = AsyncTargetExecutor(self.runner)  # type: ignore[arg-type]
        self.core: EngineCore[Any, Any, Any, Any] = EngineCore(
            SessionRegistry(self.runner.sequences, Limits(VOCAB_SIZE, MAX_LENGTH, trims=False)),
            executor,
            TokenBudget(CHUNK),
            lookahead=True,
            clock=lambda: self.now_ms * MILLISECOND,
        )
        self.driver = Driver(self.core)
        self.generations = itertools.count(1)
        self.asked: dict[int, tuple[Open, Asked]] = {}

    def ask(self, session: int, tokens: list[int], **more: Any) -> None:
        """Open a session and ask for its first token."""
        opened = open_session(
            session, generation=next(self.generations), prompt_length=len(tokens), max_length=MAX_LENGTH,
            num_token_ids=VOCAB_SIZE - 1, **more,
        )  # fmt: skip
        self.driver.send(opened)
        self.score(opened, tokens)

    def score(self, opened: Open, tokens: list[int], num_kept_tokens: int = 0) -> None:
        item = score_item(opened.session, next(self.generations), tokens, num_kept_tokens=num_kept_tokens)
        self.driver.send(item)
        self.asked[item.generation] = opened, Asked(item, tuple(tokens))

    def release(self, session: int) -> None:
        self.driver.send(Release(session, next(self.generations)))

    def step(self) -> list[Any]:
        """Answers of the work that is due, compared with the expected ones."""
        events = []
        for _ in range(10):
            if self.core.has_work and not self.core.pause_s:
                events += self.driver.step()
        with self._patch.context() as patch:
            patch.setattr(MARK, Mark)
            for event in events:
                if not isinstance(event, Refused | Preempted):
                    expected = reference(*self.asked[event.generation])
                    assert written(event) == pytest.approx(written(expected), rel=1e-4, nan_ok=True)
        return events

    def end_forward(self) -> list[Any]:
        self.num_ended += 1
        return self.step()

    def finish(self) -> list[Any]:
        events = self.step()
        while self.core.has_work:
            events += self.end_forward()
        self.runner.sequences.check_integrity()
        return events

    @property
    def in_flight(self) -> list[list[tuple[int, int]]]:
        """Sessions of each forward in flight, and the tokens of each."""
        return [
            [(request.session.open.session, tokens) for request, tokens in batch.scheduled]
            for batch in self.core.in_flight
        ]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_the_next_chunk_starts_before_the_one_before_it_has_ended(rig: Rig) -> None:
    rig.ask(1, LONG)
    assert rig.step() == []
    assert rig.in_flight == [[(1, 12)], [(1, 12)]]
    assert rig.end_forward() == []
    assert rig.in_flight == [[(1, 12)], [(1, 12)]]
    rig.end_forward()
    assert rig.in_flight == [[(1, 12)], [(1, 4)]]
    rig.end_forward()
    (answer,) = rig.end_forward()
    assert answer.base_length == len(LONG)
    assert not rig.core.has_work
    assert rig.core.stats.num_tokens.read().total == len(LONG)


def test_what_ends_a_prompt_is_hashed_while_it_is_computed(rig: Rig) -> None:
    rig.ask(1, LONG)
    rig.step()
    (session,) = rig.core.sessions.sessions()
    assert len(session.sequence.page_keys) == 24 // PAGE_SIZE
    assert session.sequence.num_registered_pages == 0  # nobody may find what was not computed


def test_nothing_is_queued_while_sessions_run(rig: Rig) -> None:
    rig.ask(1, OTHER[:5])
    rig.finish()
    rig.ask(2, LONG)
    rig.step()
    assert rig.in_flight == [[(2, 12)]]
    rig.release(1)
    rig.end_forward()
    assert len(rig.in_flight) == 2
    rig.finish()


def test_who_comes_before_most_of_a_chunk_is_done_shares_the_next_one(rig: Rig) -> None:
    rig.ask(1, LONG)
    rig.step()
    for _ in range(3):  # the device takes 10 ms a chunk, which the core sees
        rig.now_ms += 10
        rig.end_forward()
    rig.now_ms += 10
    rig.finish()
    rig.release(1)
    rig.ask(2, OTHER)
    rig.step()
    assert rig.in_flight == [[(2, 12)]]
    rig.now_ms += 5
    rig.ask(3, LONG[::-1])
    rig.step()
    assert rig.in_flight == [[(2, 12)]]
    rig.now_ms += 4
    rig.step()
    assert rig.in_flight == [[(2, 12)], [(3, 12)]]
    assert len(rig.finish()) == 2


def test_a_session_that_ends_between_its_chunks_gives_its_pages_back(rig: Rig) -> None:
    rig.ask(1, LONG)
    rig.step()
    rig.release(1)
    assert rig.runner.sequences.pool.num_used == 0
    rig.ask(2, OTHER)
    (answer,) = rig.finish()
    assert answer.session == 2


def test_a_newer_item_waits_for_the_queued_chunk_and_replaces_the_older_one(rig: Rig) -> None:
    rig.ask(1, LONG)
    rig.step()
    opened, _ = rig.asked[2]
    rig.score(opened, OTHER)
    rig.step()
    assert rig.in_flight == [[(1, 12)], [(1, 12)]]
    rig.end_forward()
    assert rig.in_flight == [[(1, 12)]]  # no more of what nobody asks for
    (answer,) = rig.finish()
    assert answer.generation == 3


@pytest.mark.parametrize("change", [lambda rig: rig.core.drop_link(0), lambda rig: rig.ask(1, OTHER)])
def test_a_session_may_go_and_come_back_while_its_chunks_run(rig: Rig, change: Callable[[Rig], None]) -> None:
    rig.ask(1, LONG)
    rig.step()
    change(rig)
    rig.ask(2, LONG)
    assert {answer.session for answer in rig.finish()} <= {1, 2}
    assert rig.core.num_sessions in (1, 2)


def test_no_session_is_preempted_for_a_queued_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, num_pages=5)
    rig.ask(1, LONG[:16], arrival_ns=1)
    rig.step()
    rig.ask(2, OTHER[:16], arrival_ns=2)  # there is no room for it beside the first
    rig.step()
    assert rig.core.stats.num_preempted == 0
    rig.finish()


@pytest.mark.parametrize("more", [{"num_prompt_logprobs": 1}])
def test_a_chunk_of_which_something_is_read_is_waited_for(rig: Rig, more: dict[str, Any]) -> None:
    rig.ask(1, LONG, **more)
    rig.step()
    assert rig.in_flight == [[(1, 12)]]
    rig.finish()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_gives_the_answers_of_one_prompt_after_the_other(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    choose, rig = random.Random(seed), Rig(monkeypatch, num_pages=40)
    num_answers = num_queued = 0
    for _ in range(400):
        open_ones = {session.open.session: session.open for session in rig.core.sessions.sessions()}
        what, length = choose.random(), choose.choice((1, 40, 40, 40))
        tokens = [choose.randrange(VOCAB_SIZE - 1) for _ in range(length)]
        if choose.random() < 0.3:
            tokens[:24] = LONG[: min(24, length)]  # of which something is cached
        if what < 0.2 and len(open_ones) < 3:
            rig.ask(next(number for number in range(3) if number not in open_ones), tokens)
        elif what < 0.23 and open_ones:
            rig.release(choose.choice(list(open_ones)))
        elif what < 0.26 and open_ones:
            rig.score(choose.choice(list(open_ones.values())), tokens)
        rig.now_ms += choose.choice((0, 1))
        answers = rig.end_forward() if rig.in_flight and choose.random() < 0.6 else rig.step()
        num_queued += len(rig.in_flight) == 2
        for answer in answers:
            if isinstance(answer, Scores):
                num_answers += 1
                rig.release(answer.session)
    rig.finish()
    assert min(num_answers, num_queued) > 20
