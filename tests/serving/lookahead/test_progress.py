"""Progress of an engine core as its watchdog sees it, that of the device, and masked rows beside a running forward."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from outrider.structured_output import PositionMasks
from outrider.types import SamplingParams
from tests.serving.lookahead.coordinating import GRAMMAR, core_of
from tests.serving.lookahead.device import VOCAB_SIZE, CountingExecutor, Drawing, Runner
from tests.serving.lookahead.test_queued_chunks import CHUNK, Rig
from tests.support.core_driver import open_session, score_item

PROMPT = [1, 2, 3]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_steps_are_no_progress_while_the_device_computes(rig: Rig) -> None:
    rig.ask(1, PROMPT)
    rig.step()
    began = rig.core.progress
    assert began[0]
    for _ in range(50):
        rig.driver.step()
    rig.ask(2, PROMPT)  # what comes meanwhile is none either
    rig.release(2)
    for _ in range(50):
        rig.driver.step()
    assert rig.core.progress == began
    rig.end_forward()
    assert rig.core.progress != began


def test_the_end_of_each_forward_is_progress_while_others_are_in_flight(rig: Rig) -> None:
    rig.ask(1, list(range(1, 1 + 4)) * CHUNK)
    seen = []
    rig.step()
    while rig.core.has_work:
        seen.append(rig.core.progress)
        rig.end_forward()
    assert len(seen) > 2
    assert all(is_computing for is_computing, _ in seen)
    assert len(set(seen)) == len(seen)
    assert not rig.core.progress[0]


def test_a_forward_may_take_longer_where_larger_ones_are_known_to(rig: Rig) -> None:
    assert rig.core.longest_forward_s == 0.0  # none is in flight
    rig.ask(1, PROMPT)
    rig.step()
    unknown_s = rig.core.longest_forward_s
    assert unknown_s > 10.0  # it may compile kernels
    rig.now_ms += 2000
    rig.finish()
    rig.ask(2, PROMPT)
    rig.step()
    assert rig.core.longest_forward_s == pytest.approx(2.0, rel=0.6)


def test_masked_rows_are_scored_once_their_masks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: Future[None] = Future()
    launched: list[bool] = []
    runner = Runner(100)

    def begin(masks: Sequence[PositionMasks], *, is_awaited: bool = False) -> None:
        for each in masks:
            each.await_threads([pending])

    runner.sampler.begin_masks = begin
    monkeypatch.setattr(Drawing, "launch_all", lambda self: launched.append(pending.done()))
    executor = CountingExecutor(runner)  # type: ignore[arg-type]
    core = core_of(executor, lookahead=False, max_batched_tokens=64)
    sampling = SamplingParams(temperature=0.0, grammar=GRAMMAR)
    opened = open_session(0, prompt_length=3, max_length=40, num_token_ids=VOCAB_SIZE - 1, sampling=sampling)
    core.handle(0, [opened, score_item(0, 2, [1, 2, 3])])
    batch = core.scheduler.schedule([])
    assert batch is not None
    forward = executor.start([(request.job, tokens) for request, tokens in batch.scheduled])
    assert forward.is_done() and not launched
    pending.set_result(None)
    assert forward.is_done() and launched == [True]
    assert forward.is_done() and launched == [True]
