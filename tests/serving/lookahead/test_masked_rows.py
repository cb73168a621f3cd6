"""Masked rows are scored while the forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from outrider.structured_output import PositionMasks
from outrider.types import SamplingParams
from tests.serving.lookahead.coordinating import GRAMMAR, core_of
from tests.serving.lookahead.device import VOCAB_SIZE, CountingExecutor, Drawing, Runner
from tests.support.core_driver import open_session, score_item


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
