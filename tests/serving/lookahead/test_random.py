"""Answers are those without lookahead, whatever comes between the start of a forward and its end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.recording import AheadRecord, AnyRecord, ItemRecord
from outrider.serving.engine_core import EngineCore
from outrider.telemetry.tracing.service_spans import item_spans
from tests.serving.lookahead.coordinating import KINDS, Coordinator, core_of
from tests.serving.lookahead.device import CountingExecutor, Drawing, Runner

Core = EngineCore[Any, Any, Any, Any]
NUM_ROUNDS, ROUNDS_OF_A_KIND = 360, 30
NUM_PAGES = 24
"""Pages, too few for all sessions."""


class Spans:
    """Checks the spans of what is traced."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.items: list[ItemRecord] = []

    def ended(self, items: Sequence[AnyRecord]) -> None:
        for item in items:
            if isinstance(item, AheadRecord):
                assert item.ended_ns >= item.started_ns
                continue
            assert item.trace_parent not in self.seen
            self.seen.add(item.trace_parent)
            for span in list(item_spans(item, "score")):
                assert span.end_ns >= span.start_ns, span
            self.items.append(item)

    def check_nothing_was_noted_after_an_end(self) -> None:
        assert not any(item.forwards for item in self.items)  # making spans has emptied them


def _step(core: Core, links: dict[int, Coordinator]) -> None:
    for link_id, batch in core.step():
        for event, timing in batch.timed():
            if timing is not None:
                stages = (timing.queue_ns, timing.forward_ns, timing.sample_ns, timing.wait_ns)
                assert min(stages) >= 0
                assert sum(stages) == timing.total_ns
            links[link_id].take(event)
    core.post_step()
    for link in links.values():
        link.check_waits()


def _is_empty(core: Core) -> bool:
    return core.scheduler.queue.is_empty and not core.has_work


def _postprocess(core: Core, links: dict[int, Coordinator]) -> None:
    for _ in range(200):
        if not core.has_work:
            break
        _step(core, links)
    assert not core.has_work
    assert all(session.newest is None for link in links.values() for session in link.sessions.values())


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_of_a_target_that_foresees_nothing(seed: int) -> None:
    choose = Drawing.choose = random.Random(seed)
    runner = Runner(NUM_PAGES)
    executor = CountingExecutor(runner)  # type: ignore[arg-type]
    core = core_of(executor, lookahead=True)
    core.recorder = spans = Spans()
    links = {i: Coordinator(core, i, choose) for i in range(2)}
    num_checked = 0
    for number in range(NUM_ROUNDS):
        kind = KINDS[number // ROUNDS_OF_A_KIND % len(KINDS)]
        for link in links.values():
            if number % ROUNDS_OF_A_KIND == 0 and choose.random() < 0.7:
                link.release_all()
            link.act(kind)
        while choose.random() < 0.7:
            _step(core, links)
        if number % ROUNDS_OF_A_KIND == 0:
            _postprocess(core, links)
            runner.sequences.check_integrity()
        if choose.random() < 0.005:
            link_id = choose.choice(list(links))
            num_checked += links.pop(link_id).num_checked
            core.drop_link(link_id)
            links[max(link_id, *links) + 1] = Coordinator(core, max(link_id, *links) + 1, choose)
    _postprocess(core, links)
    for link in links.values():
        num_checked += link.num_checked
        link.release_all()
    _postprocess(core, links)
    lookahead, stats = core.scheduler.lookahead, core.stats
    assert _is_empty(core)
    assert lookahead.is_idle
    assert core.num_sessions == runner.sequences.pool.num_used == 0
    assert stats.num_lookahead_used + stats.num_lookahead_unused == executor.num_prepared + executor.num_queued
    assert num_checked > NUM_ROUNDS / 2
    assert core.stats.num_preempted
    assert len(spans.seen) > NUM_ROUNDS / 2
    spans.check_nothing_was_noted_after_an_end()
    assert min(stats.num_lookahead_used, stats.num_lookahead_unused, executor.num_queued) > 20
