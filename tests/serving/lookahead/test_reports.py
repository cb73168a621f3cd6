"""Reports of forwards whose answers leave in several messages, and a session that fails while another item runs."""

from __future__ import annotations

import random

import pytest

from outrider.item_batch import batch_of_commands
from outrider.ports import Prepare, Scores, SessionFailed
from outrider.serving.decode import lookahead_steps
from outrider.serving.decode.lookahead_steps import LookaheadAnswers
from tests.serving.lookahead.coordinating import core_of
from tests.serving.lookahead.device import VOCAB_SIZE, CountingExecutor, Drawing, Runner
from tests.support.core_driver import Driver, open_session, score_item

NUM_SESSIONS, NUM_STEPS = 4, 8


class _NeverWrong(random.Random):
    """Random numbers for a device that is never wrong."""

    def random(self) -> float:
        return 1.0


def test_answers_of_a_forward_in_arrays_tell_its_end_though_they_leave_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead_steps, "FEWEST_SESSIONS", 2)
    monkeypatch.setattr(Drawing, "choose", _NeverWrong())  # a session whose token was wrong is answered on its own
    num_in_arrays = 0
    by_link = LookaheadAnswers.by_link

    def counted(answers: LookaheadAnswers) -> list[tuple[int, LookaheadAnswers]]:
        nonlocal num_in_arrays
        num_in_arrays += 1
        return by_link(answers)

    monkeypatch.setattr(LookaheadAnswers, "by_link", counted)
    core = core_of(CountingExecutor(Runner(100)), lookahead=True, max_batched_tokens=64)  # type: ignore[arg-type]
    core.scheduler.plain.links.add(0)
    driver = Driver(core)
    texts = [[1, 2, 3 + number] for number in range(NUM_SESSIONS)]
    for number, text in enumerate(texts):
        opened = open_session(number, prompt_length=3, max_length=40, num_token_ids=VOCAB_SIZE - 1)
        driver.send(opened, score_item(number, 2, text), Prepare(number, 2, 50))
    kept = [0] * NUM_SESSIONS

    def ends_of(sessions: range) -> list[int]:
        """End times of the forwards of these sessions' newest tokens, which are taken in."""
        driver.reports.clear()
        told: list[Scores] = []
        while len(told) < len(sessions):
            told += [event for event in driver.step() if isinstance(event, Scores)]
        assert {event.session for event in told} == set(sessions)
        for event in told:
            kept[event.session] = len(texts[event.session])
            texts[event.session].append(event.form.token_ids[0])  # type: ignore[union-attr]
        return [report.ended_ns for report in driver.reports]

    def ask(sessions: range, generation: int) -> None:
        items = [score_item(n, generation, texts[n], num_kept_tokens=kept[n]) for n in sessions]
        core.handle(driver.link_id, batch_of_commands(items))

    ends_of(range(NUM_SESSIONS))
    ends = []
    for step in range(NUM_STEPS):
        for some in (range(2), range(2, NUM_SESSIONS)):
            ask(some, step + 3)
            ends.append(ends_of(some))
    assert num_in_arrays > NUM_STEPS
    assert all(len(each) == 1 and each[0] > 0 for each in ends)
    first, second = ends[2::2], ends[3::2]
    assert first == second and first == sorted(first) and len({each[0] for each in first}) == len(first)


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
        core.post_step()
    assert [event.session for event in events if isinstance(event, SessionFailed)] == [0]
    assert sorted(event.session for event in events if isinstance(event, Scores)) == list(range(NUM_SESSIONS))
    assert core.num_sessions == NUM_SESSIONS - 1
    core.drop_link(0)
    assert runner.sequences.pool.num_used == 0
