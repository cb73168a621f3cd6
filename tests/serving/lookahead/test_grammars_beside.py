"""Sessions with grammars: drafts that plain steps follow stop no lookahead, and masked rows are scored in time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from outrider.ports import Prepare
from outrider.structured_output import PositionMasks
from outrider.types import SamplingParams
from tests.serving.lookahead.coordinating import GRAMMAR, core_of
from tests.serving.lookahead.device import VOCAB_SIZE, CountingExecutor, Drawing, Runner
from tests.support.core_driver import open_session, score_item


@pytest.mark.parametrize("expects_plain", (True, False))
def test_drafts_that_plain_steps_follow_stop_no_lookahead(expects_plain: bool) -> None:
    core = core_of(CountingExecutor(Runner(100)), lookahead=True, max_batched_tokens=64)  # type: ignore[arg-type]
    for number in range(2):
        opened = open_session(number, prompt_length=3, max_length=40, num_token_ids=VOCAB_SIZE - 1)
        core.handle(0, [opened, score_item(number, 2, [1, 2, 3 + number]), Prepare(number, 2, 50)])
    while core._scheduler.queue.due_of((0, 1)) is not None:
        core.step()
    drafted = score_item(1, 3, [1, 2, 4, 9], num_kept_tokens=3, drafts=(4, 5))
    core.handle(0, [drafted, *([Prepare(1, 3, 50)] if expects_plain else [])])
    assert core._scheduler.lookahead.is_possible == expects_plain


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
    batch = core._scheduler.schedule([])
    assert batch is not None
    forward = executor.start([(request.job, tokens) for request, tokens in batch.scheduled])
    assert forward.is_done() and not launched
    pending.set_result(None)
    assert forward.is_done() and launched == [True]
    assert forward.is_done() and launched == [True]
