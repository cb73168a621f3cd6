"""Early scores: they wait until proposals have come here; all else of their message goes on at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.batched import AnswerBatch, Column, token_scores
from outrider.ports import EventBatch, ForwardReport, ItemTiming, Preempted, Scores
from outrider.types import TokenScores
from outrider_coordinator.requests.answer_batch import in_batch
from outrider_coordinator.requests.early_scores import EarlyScores

REPORT = ForwardReport(1, 2, 3, 4, 5, 6, 7, 8)
EARLY = {(1, 10), (2, 10), (3, 10)}
A: Any = object()
B: Any = object()


def scores(session: int, generation: int = 10) -> Scores:
    return Scores(session, generation, 4, TokenScores((5, 6)), draft_token_ids=(5,))


def batched(*sessions: int, generation: int = 10, is_direct: bool = True) -> AnswerBatch[Any]:
    size = len(sessions)
    return AnswerBatch(
        np.array(sessions, dtype="<u8"),
        np.full(size, generation, dtype="<u8"),
        np.full(size, 4, dtype="<u4"),
        np.full(size, 2, dtype="<u4"),
        np.full(2 * size, 5, dtype="<u4"),
        (),
        token_scores,
        draft_token_ids=np.full(size, 5, dtype="<u4") if is_direct else None,
    )


def timing(number: int) -> ItemTiming:
    return ItemTiming(number, 2, 3, 4, 5)


@pytest.fixture
def early() -> EarlyScores:
    def are_early(sessions: Column, generations: Column) -> NDArray[np.bool_]:
        pairs = zip(sessions.tolist(), generations.tolist(), strict=True)
        return np.array([pair in EARLY for pair in pairs])

    return EarlyScores(are_early)


def test_a_message_is_split(early: EarlyScores) -> None:
    held, left = batched(1, 2), batched(7, 8)
    events: Any = (Preempted(1, 10, 4), Preempted(7, 10, 4))
    timings = tuple(map(timing, range(2)))
    rest = early.hold(A, EventBatch(events, REPORT, timings, (left, held)))
    assert rest is not None and early.are_held(A)
    assert (rest.events, rest.timings) == (events, timings)
    assert [id(each) for each in rest.batched] == [id(left)]
    ((replica, batch),) = early.take()
    assert replica is A
    assert (batch.events, batch.timings) == ((), ())
    assert [id(each) for each in batch.batched] == [id(held)]
    assert batch.report == REPORT
    assert rest.report == ForwardReport(0, 0, 0, 0, 0, 0, 7, 8), "a forward's times and sizes are told once"


def test_columns_are_split(early: EarlyScores) -> None:
    rest = early.hold(A, EventBatch((), REPORT, (), (batched(9, 1, 8, 3), batched(2, is_direct=False))))
    assert rest is not None
    assert [each.sessions.tolist() for each in rest.batched] == [[9, 8], [2]]
    ((_, batch),) = early.take()
    assert [each.sessions.tolist() for each in batch.batched] == [[1, 3]]


def test_single_answers_are_held_as_columns(early: EarlyScores) -> None:
    answers: Any = (scores(1), Preempted(2, 10, 4), scores(8))
    rest = early.hold(A, in_batch(EventBatch(answers, REPORT, tuple(map(timing, range(3))))))
    assert rest is not None and rest.events == (answers[1],) and rest.timings == (timing(1),)
    assert [event for each in rest.batched for event in each.events([0])] == [answers[2]]
    ((_, batch),) = early.take()
    assert batch.all_events() == (answers[0],) and batch.batched[0].timings([0]) == [timing(0)]


def test_nothing_is_left_of_a_message_of_early_scores_alone(early: EarlyScores) -> None:
    batch = EventBatch[Any]((), batched=(batched(1), batched(3)))
    assert early.hold(A, batch) is None
    ((_, held),) = early.take()
    assert not held.events and list(map(id, held.batched)) == list(map(id, batch.batched))


@pytest.mark.parametrize(
    "batch",
    [
        EventBatch[Any](()),
        EventBatch[Any]((Preempted(1, 10, 4),), REPORT, (), (batched(1, generation=11), batched(9))),
        EventBatch[Any]((), REPORT, (), (batched(9, 8), batched(1, generation=9))),
        EventBatch[Any]((), REPORT, (), (batched(8, is_direct=False),)),
    ],
)
def test_nothing_else_is_held(early: EarlyScores, batch: EventBatch[Any]) -> None:
    assert early.hold(A, batch) is batch
    assert not early.are_held(A) and early.take() == []


def test_they_are_given_back_once_in_the_order_in_which_they_came(early: EarlyScores) -> None:
    for replica, session in ((A, 2), (B, 1), (A, 3)):
        assert early.hold(replica, EventBatch((), batched=(batched(session),))) is None
    taken = early.take()
    assert [(replica, batch.sessions_in_batch) for replica, batch in taken] == [(A, [2]), (B, [1]), (A, [3])]
    assert not early.are_held(A) and early.take() == []
    assert early.hold(*taken[0]) is None, "they may have to wait again"
    assert [replica for replica, _ in early.take()] == [A]
