"""Messages longer than a link allows: cut up in order, and an answer that cannot be cut fails its session alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.ports import EventBatch, ForwardReport, ItemTiming, Release, Scores, SessionFailed
from outrider.transport.convert.commands import target_commands_from_proto, target_commands_to_proto
from outrider.transport.convert.events import target_events_from_proto, target_events_to_proto
from outrider.transport.link.splitting import split_commands, split_events
from outrider.types import CandidateLogprobs, SparseScores, TokenScores
from tests.support.equality import same

LIMIT = 8_000
REPORT = ForwardReport(1, 2, 3, 4, 5, 6, 7, 8)


def _values(session: int, count: int) -> tuple[np.ndarray, ...]:
    support, one = np.full(count, session, dtype=np.float32), np.ones(1, dtype=np.int32)
    return support, one.astype(np.float32), one


def scores(session: int, *, num_values: int = 0, num_prompt_logprobs: int = 0) -> Scores:
    if num_values:
        return Scores(session, 3, 9, SparseScores(*_values(session, num_values)))
    ids, values = np.arange(100, dtype=np.int32), np.zeros(100, dtype=np.float32)
    position = CandidateLogprobs(ids, values, ids, ids, values)
    return Scores(session, 3, 9, TokenScores((session,)), prompt_logprobs=(position,) * num_prompt_logprobs)


def split(*events: Any, limit: int = LIMIT) -> tuple[list[EventBatch[Any]], tuple[tuple[int, int], ...]]:
    timings = tuple(ItemTiming(1, 2, 3, 4, index) for index in range(len(events)))
    found = split_events(target_events_to_proto(EventBatch(events, REPORT, timings)), limit)
    assert all(message.ByteSize() <= limit for message in found.messages)
    return [target_events_from_proto(message) for message in found.messages], found.failed


def test_a_message_within_the_limit_is_left_as_it_is() -> None:
    message = target_events_to_proto(EventBatch((scores(1), scores(2)), REPORT))
    assert split_events(message, LIMIT).messages == (message,)


def test_events_keep_their_order_and_every_part_says_what_the_forward_cost() -> None:
    events = [scores(session, num_values=50 * (session % 7) + 1) for session in range(60)]
    batches, failed = split(*events)
    assert len(batches) > 1
    assert failed == ()
    assert all(batch.report == REPORT for batch in batches)
    assert same(tuple(event for batch in batches for event in batch.all_events()), tuple(events))
    timings = [own for batch in batches for part in batch.batched for own in part.timings(range(len(part.sessions)))]
    assert [timing and timing.total_ns for timing in timings] == list(range(len(events)))


@pytest.mark.parametrize(
    ("long", "field"),
    [
        ({"num_prompt_logprobs": 10}, "prompt_logprobs"),
        ({"num_values": 5_000}, "num_speculative_tokens"),
    ],
)
def test_an_answer_that_is_too_long_fails_its_session_and_no_other(long: dict[str, int], field: str) -> None:
    neighbours = [scores(1), scores(2, num_values=300), scores(4)]
    batches, failed = split(neighbours[0], neighbours[1], scores(3, **long), neighbours[2])
    assert failed == ((3, 3),)
    events = [event for batch in batches for event in batch.all_events()]
    others = sorted([event for event in events if event.session != 3], key=lambda event: int(event.session))
    assert same(others, neighbours)
    [failure] = [event for event in events if event.session == 3]
    assert isinstance(failure, SessionFailed)
    assert (failure.code, failure.field) == ("InvalidRequestError", field)
    assert str(LIMIT) in failure.message


def test_commands_are_cut_up_in_order() -> None:
    commands = [Release(session, 5) for session in range(1_000)]
    messages = split_commands(commands, target_commands_to_proto, 500)
    assert len(messages) > 4
    assert all(message.ByteSize() <= 500 for message in messages)
    assert [command for message in messages for command in target_commands_from_proto(message)] == commands
    assert len(split_commands(commands[:1], target_commands_to_proto, 1)) == 1
