"""A session that fails by the item that came while another one of it ran: nothing is computed ahead for it."""

from __future__ import annotations

import pytest

from outrider.ports import Prepare, Scores, SessionFailed
from outrider.serving.decode import lookahead_steps
from tests.serving.lookahead.coordinating import core_of
from tests.serving.lookahead.device import VOCAB_SIZE, CountingExecutor, Runner
from tests.support.core_driver import open_session, score_item

NUM_SESSIONS = 4


@pytest.mark.parametrize("fewest", [2, 99])
def test_a_session_fails_alone(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead_steps, "FEWEST_SESSIONS", fewest)
    runner = Runner(100)
    core = core_of(CountingExecutor(runner), lookahead=True, max_batched_tokens=64)  # type: ignore[arg-type]
    core.scheduler.plain.links.add(0)
    prompts = [[1, 2, 3 + number] for number in range(NUM_SESSIONS)]
    for number, prompt in enumerate(prompts):
        opened = open_session(number, prompt_length=3, max_length=40, num_token_ids=VOCAB_SIZE - 1)
        core.handle(0, [opened, score_item(number, 2, prompt), Prepare(number, 2, 50)])
    core.step()
    core.handle(0, [score_item(0, 3, [*prompts[0], VOCAB_SIZE], num_kept_tokens=3)])
    events = []
    for _ in range(8):
        for _, batch in core.step():
            events += [event for event in batch.events if isinstance(event, Scores | SessionFailed)]
        core.tidy()
    assert [event.session for event in events if isinstance(event, SessionFailed)] == [0]
    assert sorted(event.session for event in events if isinstance(event, Scores)) == list(range(NUM_SESSIONS))
    assert core.num_sessions == NUM_SESSIONS - 1
    core.drop_link(0)
    assert runner.sequences.pool.num_used == 0
