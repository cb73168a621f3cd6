"""Timeouts of steps that wait for a draft: by its own times, once for all while it is silent, and again when it is
back.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.types import AcceptanceMethod
from outrider_coordinator.requests.draft_waits import DECAY_RATIO, FLOOR_RATIO, MARGIN_RATIO, DraftTimeout, DraftWaits
from tests.coordinator.test_service import ask, eventually, own_tokens, stack

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
    seconds: Any = DraftTimeout.seconds

    def noted(self: DraftTimeout) -> float:
        delays.append(seconds.fget(self))
        return delays[-1]

    monkeypatch.setattr(DraftTimeout, "seconds", property(noted))
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


class Waiting:
    """A request that waits for its draft, as far as its waits read it."""

    def __init__(self, name: str) -> None:
        self.name, self.place, self.draft_wait_began = name, SimpleNamespace(draft="draft"), None


class Waits:
    """Draft waits of given lengths, and the steps that were told that their time is up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[str, int]] = []
        self._waits = DraftWaits(LONGEST_S, running=lambda: (), time_out=self._tell)
        self._waits.attached(cast(Any, "draft"))
        self._delay_s = 0.0
        monkeypatch.setattr(DraftTimeout, "seconds", property(lambda _: self._delay_s))

    def _tell(self, request: Any, step: int) -> None:
        self.told.append((request.name, step))

    def begin(self, request: Any, step: int, delay_s: float) -> None:
        self._delay_s = delay_s
        self._waits.begin(request, step)

    def end(self, request: Any) -> None:
        self._waits.end(request)


async def test_each_wait_is_told_once_in_whatever_order_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, one, other, last = Waits(monkeypatch), Waiting("one"), Waiting("other"), Waiting("last")
    waits.begin(last, 1, 1000.0)
    waits.begin(one, 2, 0.02)
    waits.begin(other, 3, 0.001)
    await eventually(lambda: len(waits.told) > 1)
    assert set(waits.told) == {("other", 3), ("one", 2)}  # in any order if the second is due by the time of the first
    waits.begin(one, 4, 0.001)
    await eventually(lambda: len(waits.told) > 2)
    assert waits.told[2:] == [("one", 4)]


async def test_the_last_wait_of_a_request_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, request = Waits(monkeypatch), Waiting("one")
    waits.begin(request, 1, 0.001)
    began = asyncio.get_running_loop().time()
    waits.begin(request, 2, 0.02)
    await eventually(lambda: bool(waits.told))
    assert waits.told == [("one", 2)]
    assert asyncio.get_running_loop().time() - began >= 0.0199  # timers may ring a resolution of the clock too early


async def test_a_wait_that_has_ended_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, ended, other = Waits(monkeypatch), Waiting("ended"), Waiting("other")
    waits.begin(ended, 1, 0.001)
    waits.end(ended)
    waits.begin(other, 1, 0.02)
    await eventually(lambda: bool(waits.told))
    assert waits.told == [("other", 1)]
