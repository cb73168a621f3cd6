"""Plain steps that are computed ahead as arrays: whatever else comes, all are answered as by a target alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outrider.ports import EventBatch, Prepare
from outrider.serving.decode import lookahead_steps
from outrider.serving.decode.lookahead_step import LookaheadStep
from outrider.serving.decode.lookahead_steps import LookaheadSteps
from outrider.serving.request import Batch
from outrider.transport.convert.commands import target_commands_from_proto, target_commands_to_proto
from outrider.transport.convert.events import target_events_from_proto, target_events_to_proto
from outrider.v1 import link_pb2 as pb
from tests.serving.lookahead.coordinating import CALM, Command, Coordinator, Kind, core_of
from tests.serving.lookahead.device import CountingExecutor, Drawing, Runner
from tests.serving.lookahead.test_random import Spans
from tests.support.equality import one_by_one

NUM_ROUNDS, ROUNDS_OF_A_KIND = 140, 20
KINDS = (CALM, Kind(is_odd=True), CALM, Kind(), CALM, CALM, Kind(has_drafts=True, is_odd=True))


class BatchCoordinator(Coordinator):
    """Sends items as arrays where there are enough of them, and reads answers as such."""

    most_sessions = 8

    def act(self, kind: Kind) -> None:
        while kind.is_calm and len(self.sessions) < self.most_sessions:
            number = next(i for i in range(self.most_sessions) if i not in self.sessions)
            self.send(*self._open(number, is_odd=False))
        super().act(kind)

    def _credit(self, session: int, generation: int) -> list[Command]:
        """Mostly as much as a session can use."""
        if self._choose.random() < 0.1:
            return super()._credit(session, generation)
        return [Prepare(session, generation, 50)]

    def send(self, *commands: Command) -> None:
        credit = [command for command in commands if isinstance(command, Prepare)]
        others = [command for command in commands if not isinstance(command, Prepare)]
        for message in (others, credit):
            if message:
                content = target_commands_to_proto(message).SerializeToString()
                read = target_commands_from_proto(pb.TargetCommands.FromString(content))
                self.driver.send(*read)


class _Rig:
    def __init__(self, seed: int, num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choose = Drawing.choose = random.Random(seed)
        self.runner = Runner(num_pages)
        self.executor = CountingExecutor(self.runner)  # type: ignore[arg-type]
        self.core = core_of(self.executor, lookahead=True, max_batched_tokens=64)
        self.core.recorder = self.spans = Spans()
        self.links = {i: BatchCoordinator(self.core, i, self.choose) for i in range(2)}
        self.outcomes: Counter[str] = Counter()
        self.num_checked = self.num_grown = self.num_queued = 0
        """Answers; rows of plain steps that followed others, and of those that were queued."""
        plain = self.core.scheduler.plain
        monkeypatch.setattr(plain, "grow", self._count(plain, plain.grow))
        monkeypatch.setattr(plain, "resolve", self._count_queued(plain.resolve))

    def _count(self, plain: LookaheadSteps, grow: Callable[[], None]) -> Callable[[], None]:
        def num_due() -> int:
            return 0 if plain.due is None else len(plain.due)

        def counted() -> None:
            before = num_due()
            grow()
            self.num_grown += num_due() - before

        return counted

    def _count_queued(self, resolve: Callable[..., None]) -> Callable[..., None]:
        def counted(queued: Batch, before: LookaheadStep) -> None:
            resolve(queued, before)
            assert queued.plain is not None
            self.num_queued += int(queued.plain.is_here.sum())

        return counted

    def run(self) -> None:
        for number in range(NUM_ROUNDS):
            kind = KINDS[number // ROUNDS_OF_A_KIND % len(KINDS)]
            for link in self.links.values():
                if number % ROUNDS_OF_A_KIND == 0 and self.choose.random() < 0.5:
                    link.release_all()
                link.act(kind)
            while self.choose.random() < 0.7:
                self.step()
            if number % ROUNDS_OF_A_KIND == 0:
                self.postprocess()
                self.runner.sequences.check_integrity()
            if self.choose.random() < 0.005:
                self.drop(self.choose.choice(list(self.links)))
        self.postprocess()
        for link_id in list(self.links):
            self.drop(link_id)
        self.postprocess()

    def drop(self, link_id: int) -> None:
        self.num_checked += self.links.pop(link_id).num_checked
        self.core.drop_link(link_id)
        newest = max(link_id, *self.links, -1) + 1
        self.links[newest] = BatchCoordinator(self.core, newest, self.choose)

    def step(self) -> None:
        messages = self.core.step()
        for link_id, batch in messages:
            self.outcomes["columns"] += len(batch.batched)
            for event, timing in self._as_read(batch).timed():
                if timing is not None:
                    stages = (timing.queue_ns, timing.forward_ns, timing.sample_ns, timing.wait_ns)
                    assert min(stages) >= 0
                    assert sum(stages) == timing.total_ns
                self.outcomes[type(event).__name__] += 1
                self.links[link_id].take(event)
        self.core.post_step()
        for link in self.links.values():
            link.check_waits()

    def postprocess(self) -> None:
        for _ in range(200):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        for link in self.links.values():
            assert all(session.newest is None for session in link.sessions.values())

    @staticmethod
    def _as_read(batch: EventBatch[Any]) -> EventBatch[Any]:
        return one_by_one(target_events_from_proto(target_events_to_proto(batch)))


@pytest.mark.parametrize(
    ("seed", "num_pages"), [(0, 1000), pytest.param(1, 1000, marks=pytest.mark.integration), (3, 40)]
)
def test_answers_are_those_of_a_target_that_foresees_nothing(
    seed: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead_steps, "FEWEST_SESSIONS", 4)
    rig = _Rig(seed, num_pages, monkeypatch)
    rig.run()
    core, stats = rig.core, rig.core.stats
    assert core.scheduler.is_free
    assert not core.scheduler.plain.has_members
    assert core.scheduler.lookahead.is_idle
    assert core.num_sessions == rig.runner.sequences.pool.num_used == 0
    assert rig.num_checked > NUM_ROUNDS / 2
    assert len(rig.spans.items) > NUM_ROUNDS / 4
    rig.spans.check_nothing_was_noted_after_an_end()
    assert rig.outcomes["SessionFailed"]
    assert min(stats.num_lookahead_used, stats.num_lookahead_unused) > 20
    prepared = rig.executor.num_prepared + rig.executor.num_queued + rig.num_grown
    assert stats.num_lookahead_used + stats.num_lookahead_unused == prepared
    if num_pages == 1000:
        assert rig.executor.num_plain > 200, rig.outcomes
        assert rig.num_grown > 100
    elif num_pages == 40:
        assert stats.num_preempted
