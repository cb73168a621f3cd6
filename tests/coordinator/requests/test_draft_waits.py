"""Timeouts of steps that wait for a draft: by its own times, once for all while it is silent, and again when it is
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from outrider.types import AcceptanceMethod
from outrider_coordinator.requests.draft_waits import DECAY_RATIO, FLOOR_RATIO, MARGIN_RATIO, DraftTimeout
from outrider_coordinator.requests.request_state import RequestState
from tests.coordinator.test_service import ask, own_tokens, stack

LONGEST_S = 1.0


def test_a_draft_that_never_answered_is_waited_for_longest() -> None:
    assert DraftTimeout(LONGEST_S).seconds == LONGEST_S


@pytest.mark.parametrize(
    ("usual_s", "expected_s"),
    [(0.001, FLOOR_RATIO * LONGEST_S), (0.1, MARGIN_RATIO * 0.1), (0.5, LONGEST_S), (7.0, LONGEST_S)],
)
def test_the_timeout_follows_the_usual_times_between_its_bounds(usual_s: float, expected_s: float) -> None:
    timeout = DraftTimeout(LONGEST_S)
    timeout.note_wait(usual_s)
    assert timeout.seconds == pytest.approx(expected_s)


def test_one_slow_answer_counts_for_a_while() -> None:
    timeout = DraftTimeout(LONGEST_S)
    timeout.note_wait(0.1)
    for _ in range(10):
        timeout.note_wait(0.001)
    assert timeout.seconds == pytest.approx(MARGIN_RATIO * 0.1 * DECAY_RATIO**10)
    for _ in range(1000):
        timeout.note_wait(0.001)
    assert timeout.seconds == FLOOR_RATIO * LONGEST_S


def test_a_silent_draft_is_not_waited_for_until_it_answers() -> None:
    timeout = DraftTimeout(LONGEST_S)
    timeout.note_response(10.0)
    timeout.note_timeout(began=9.5)  # others were answered meanwhile: only this session's answer is late
    assert not timeout.is_silent
    timeout.note_timeout(began=10.5)
    assert timeout.is_silent
    assert timeout.seconds == 0.0
    timeout.note_response(20.0)
    assert timeout.seconds == LONGEST_S


async def test_sessions_wait_once_for_a_draft_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    set_timer = RequestState.set_draft_timer

    def noted(self: RequestState, delay_s: float, ring: Callable[[], None]) -> None:
        delays.append(delay_s)
        set_timer(self, delay_s, ring)

    monkeypatch.setattr(RequestState, "set_draft_timer", noted)
    requests = [ask(acceptance_method=AcceptanceMethod.COUPLED, seed=seed) for seed in range(4)]
    expected = [await own_tokens(request) for request in requests]
    async with stack(draft_timeout_ms=1000) as made:
        made.draft.faults.hold = True
        first = [asyncio.create_task(made.run(request)) for request in requests[:2]]
        assert [(await run).token_ids for run in first] == expected[:2]
        waited = [delay for delay in delays if delay]
        assert 1 <= len(waited) <= 2  # both may have begun to wait before it was known
        assert (await made.run(requests[2])).token_ids == expected[2]
        assert [delay for delay in delays if delay] == waited
        assert len(delays) > len(waited)
        made.draft.faults.hold = False
        made.draft.release_held()
        result = await made.run(requests[3])
        assert result.token_ids == expected[3]
        assert result.speculation.num_accepted_tokens > 0
        assert delays[-1] > 0
