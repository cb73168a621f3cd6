"""Answers as arrays: every value comes back, and every malformed column is a clear error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outrider import ports
from outrider.batched import AnswerBatch
from outrider.errors import ProtocolError
from outrider.limits import LINK_DRAFT_TOKEN_IDS, LINK_FIELDS, LINK_ITEMS, LINK_POSITIONS
from outrider.planes import ID_BYTES, PlaneReference
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.stalls import NO_STALL
from outrider.transport.convert.commands import target_commands_from_proto
from outrider.transport.convert.events import (
    draft_events_from_proto,
    draft_events_to_proto,
    target_events_from_proto,
    target_events_to_proto,
)
from outrider.transport.link.pump import LinkPump
from outrider.transport.remote import RemoteTarget
from outrider.types import (
    CandidateLogprobs,
    HiddenStates,
    JudgingRule,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from outrider.v1 import link_pb2 as pb
from tests.support.equality import one_by_one
from tests.support.scripted_ports import ToyTarget, random_rows
from tests.transport.conftest import Serve
from tests.transport.test_links import opening

REPORT = ports.ForwardReport(1, 2, 3, 4, 5, 6, 7, 8)
BYTES = pb.StepAnswers.DESCRIPTOR.fields_by_name["sessions"].type
COLUMNS = [field.name for field in pb.StepAnswers.DESCRIPTOR.fields if field.type == BYTES]
CANDIDATES = [field.name for field in pb.CandidateBatch.DESCRIPTOR.fields]
LAST = (1 << 32) - 1


def greedy(session: int, num_tokens: int = 3) -> ports.Scores:
    token_ids = tuple(range(session % 1000, session % 1000 + num_tokens))
    return ports.Scores(session, session + 7, 100 + session % 50, TokenScores(token_ids))


def sampled(session: int, num_drafted: int = 0) -> ports.Scores:
    form = SparseScores(
        np.full(2 * num_drafted, 0.25, dtype=np.float32),
        np.full(num_drafted + 1, 0.5, dtype=np.float32),
        np.arange(session, session + num_drafted + 1, dtype=np.int32),
    )
    return ports.Scores(session, 3, 20, form)


def typical(session: int) -> ports.Scores:
    floats, ids = np.full(2, 0.5, dtype=np.float32), np.full(2, session, dtype=np.int32)
    return ports.Scores(session, 3, 20, TypicalScores(floats, floats, ids, 5))


def drawn(session: int, counts: Sequence[int]) -> ports.Proposal:
    ids = np.arange(sum(counts), dtype=np.int32) + session
    evidence = SparseEvidence(np.array(counts, dtype=np.int32), ids, (ids / 7).astype(np.float32))
    return ports.Proposal(session, 4, 30 + session, tuple(range(len(counts))), evidence)


def candidates(count: int) -> CandidateLogprobs:
    ids, values = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.float32)
    return CandidateLogprobs(ids, -values, ids + 1, ids[1:] + 2, values[1:])


def with_logprobs(session: int, num_prompt: int = 0) -> ports.Scores:
    positions = tuple(candidates(1 + (session + place) % 3) for place in range(2))
    return ports.Scores(session, 1, 2, TokenScores((1, 4)), positions, tuple(map(candidates, range(1, num_prompt + 1))))


def plain(event: Any) -> Any:
    """Values that can be compared."""
    parts: Any
    if isinstance(event, ports.Scores) and isinstance(event.form, SparseScores):
        parts = (event.form.support_probs, event.form.outside_mass, event.form.outside_token_ids)
        return event.session, event.generation, event.base_length, [(part.dtype, part.tolist()) for part in parts]
    if isinstance(event, ports.Scores) and (event.logprobs or not isinstance(event.form, TokenScores)):
        return repr(event)
    if isinstance(event, ports.Proposal) and isinstance(event.evidence, SparseEvidence):
        parts = (event.evidence.counts, event.evidence.token_ids, event.evidence.probs)
        return event.session, event.base_length, event.token_ids, [(part.dtype, part.tolist()) for part in parts]
    return event


def timing(event: Any) -> ports.ItemTiming:
    return ports.ItemTiming(event.session, 2, 3, 4, 5)


def sent(events: list[Any], *, timed: bool = True) -> tuple[pb.TargetEvents, ports.EventBatch[Any]]:
    batch = ports.EventBatch(tuple(events), REPORT, tuple(map(timing, events)) if timed else ())
    message = target_events_to_proto(batch)
    return message, target_events_from_proto(pb.TargetEvents.FromString(message.SerializeToString()))


def answers_of(message: Any) -> list[pb.StepAnswers]:
    return [event.answers for event in message.events if event.HasField("answers")]


def timed_events(batch: ports.EventBatch[Any]) -> dict[int, tuple[Any, Any]]:
    """Event and time by session."""
    return {event.session: (plain(event), time) for event, time in one_by_one(batch).timed()}


def test_tokens_come_back_equal_with_the_time_of_each() -> None:
    events = [greedy((1 << 63) + index, index % 4) for index in range(32)]
    message, batch = sent(events)
    assert len(message.events) == 1 and not batch.events
    assert batch.report == REPORT
    assert timed_events(batch) == {event.session: (event, timing(event)) for event in events}


def test_a_time_that_all_share_travels_once() -> None:
    events, time = [greedy(index) for index in range(6)], ports.ItemTiming(1, 2, 3, 4, 5)
    message = target_events_to_proto(ports.EventBatch(tuple(events), None, (time,) * 6))
    assert len(answers_of(message)[0].timings_ns) == 48
    assert [each for _, each in timed_events(target_events_from_proto(message)).values()] == [time] * 6


def test_the_largest_values_of_each_column_travel() -> None:
    largest = [ports.Scores((1 << 64) - 1 - index, (1 << 64) - 1, LAST, TokenScores((LAST,))) for index in range(4)]
    assert list(sent(largest)[1].all_events()) == largest


def with_states(event: ports.Scores, plane: int = 0) -> ports.Scores:
    reference = PlaneReference(bytes([plane]) * ID_BYTES, 64 * event.session, 24, event.session + 5)
    event.hidden_states = HiddenStates(event.base_length - 1, 3, 4, "bfloat16", b"", (reference,))  # type: ignore[misc]
    return event


def test_states_by_one_reference_are_columns_of_each_plane() -> None:
    events = [with_states(greedy(index), index % 2) for index in range(32)]
    message, batch = sent(events)
    assert len(message.events) == len(batch.batched) == 2
    assert sorted(batch.all_events(), key=lambda event: event.session) == events
    drawn_events = [with_states(sampled(index, 2)) for index in range(8)]
    message, batch = sent(drawn_events)
    assert len(message.events) == 1
    found = batch.all_events()
    assert [event.hidden_states for event in found] == [event.hidden_states for event in drawn_events]


def test_columns_are_written_as_they_were_read() -> None:
    for events in (
        [with_states(greedy(index, 2 + index % 3)) for index in range(8)],
        [sampled(index, index % 3) for index in range(8)],
    ):
        message, batch = sent(events)
        assert not batch.events and len(batch.batched) == 1
        assert target_events_to_proto(batch) == message


def kept(events: list[Any]) -> AnswerBatch[Any]:
    """The events as arrays that were sent as such, and again."""
    batch: ports.EventBatch[Any] = ports.EventBatch(tuple(events))
    for _ in range(2):
        if isinstance(events[0], ports.Proposal):
            batch = draft_events_from_proto(draft_events_to_proto(batch))
        else:
            batch = target_events_from_proto(target_events_to_proto(batch))
        assert not batch.events
    (batched,) = batch.batched
    return batched


@pytest.mark.parametrize(
    "events",
    [
        [sampled(index, index % 4) for index in range(9)],
        [drawn(index, [3, 0, 2][: 1 + index % 3]) for index in range(9)],
        [greedy(index, index % 4) for index in range(9)],
        [greedy(1, 1)],
        [sampled(1)],
        [ports.Proposal(1, 2, 9, ())],
        [ports.Proposal(1, 2, 9, (3,))],
        [drawn(1, [2])],
    ],
)
def test_answers_of_any_number_and_length_are_columns_and_may_be_selected(events: list[Any]) -> None:
    batched = kept(events)
    assert list(map(plain, batched.events(range(len(events))))) == list(map(plain, events))
    indices = [place for place in (7, 1, 2, 0) if place < len(events)]
    chosen = batched.selected(np.array(indices))
    assert list(map(plain, chosen.events(range(len(indices))))) == [plain(events[place]) for place in indices]


def inline(event: ports.Scores) -> ports.Scores:
    event.hidden_states = HiddenStates(9, 2, 4, "float32", bytes(range(32)))  # type: ignore[misc]
    return event


@pytest.mark.parametrize("timed", [True, False])
def test_answers_of_every_form_come_back_beside_other_events(timed: bool) -> None:
    events: list[Any] = []
    for index in range(0, 80, 8):
        events += [greedy(index), sampled(index + 1), with_logprobs(index + 2), typical(index + 3)]
        events += [inline(greedy(index + 5)), with_logprobs(index + 6, num_prompt=3), ports.Preempted(index + 7, 1, 10)]
    _, batch = sent(events, timed=timed)
    assert [len(batched.sessions) for batched in batch.batched] == [20, 10]
    expected = {event.session: (plain(event), timing(event) if timed else None) for event in events}
    for event in events:
        if isinstance(event, ports.Preempted):
            expected[event.session] = plain(event), None
    assert timed_events(batch) == expected


def test_an_event_of_a_session_that_is_answered_stays_behind_its_answer() -> None:
    events = [greedy(1), ports.Preempted(2, 3, 10), greedy(3), ports.Preempted(1, 9, 10)]
    message, batch = sent(events)
    assert [event.WhichOneof("event") for event in message.events] == ["preempted", "answers", "preempted"]
    assert not batch.batched
    assert [event.session for event in batch.events] == [2, 1, 3, 1]
    assert [event.session for event in sent([greedy(5), greedy(6), greedy(5, 1)])[1].all_events()] == [5, 6, 5]


def test_proposals_with_and_without_evidence_are_columns_each() -> None:
    bare = [ports.Proposal(index, 2, 9, tuple(range(index))) for index in range(6)]
    with_evidence = [
        drawn(10 + index, [1 + (index + place) % 4 for place in range(1 + index % 3)]) for index in range(6)
    ]
    message = draft_events_to_proto(ports.EventBatch((*with_evidence, *bare)))
    assert len(message.events) == 2
    found = {event.session: plain(event) for event in draft_events_from_proto(message).all_events()}
    assert found == {event.session: plain(event) for event in (*bare, *with_evidence)}


def test_answers_whose_parts_do_not_fit_are_not_sent() -> None:
    torn = drawn(20, [2, 2])
    torn.evidence.counts[0] = 1  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match="evidence"):
        draft_events_to_proto(ports.EventBatch((torn,)))
    odd = sampled(3, 1)
    odd.form.outside_mass = np.zeros(1, dtype=np.float32)  # type: ignore[union-attr,misc]
    with pytest.raises(ProtocolError, match="outside_mass"):
        sent([odd])


def test_an_answer_that_is_too_long_ends_its_link() -> None:
    with pytest.raises(ProtocolError, match=f"counts has {LINK_POSITIONS.most + 1} positions"):
        sent([greedy(index, LINK_POSITIONS.most + (index == 2)) for index in range(5)])
    drafts = tuple(ports.Proposal(index, 1, 1, (5,) * (LINK_DRAFT_TOKEN_IDS.most + 1)) for index in range(4))
    with pytest.raises(ProtocolError, match=f"counts has {LINK_DRAFT_TOKEN_IDS.most + 1} ids"):
        draft_events_from_proto(draft_events_to_proto(ports.EventBatch(drafts)))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("change", [-1, 1, -4, 8])
def test_columns_that_do_not_fit_each_other_are_told(name: str, change: int) -> None:
    for kind in (greedy, sampled, typical, lambda index: sampled(index, 2)):
        events = [kind(index) for index in range(8)]
        message, _ = sent(events)
        content = getattr(answers_of(message)[0], name)
        if not content:
            continue
        setattr(answers_of(message)[0], name, content[:change] if change < 0 else content + bytes(change))
        with pytest.raises(ProtocolError, match="columns"):
            target_events_from_proto(message)


def test_counts_and_items_are_bounded_before_anything_is_made_of_them() -> None:
    message, _ = sent([greedy(index) for index in range(4)], timed=False)
    answers_of(message)[0].counts = np.array([LAST, LAST, 2, 9], dtype="<u4").tobytes()  # their sum is 9 in 32 bits
    with pytest.raises(ProtocolError, match="a row of counts has"):
        target_events_from_proto(message)
    many = pb.TargetEvents(events=[pb.TargetEvent(answers=pb.StepAnswers(sessions=bytes(8 * LINK_ITEMS.most)))] * 2)
    with pytest.raises(ProtocolError, match=f"at most {LINK_ITEMS.most}"):
        target_events_from_proto(many)
    long = pb.StepAnswers(sessions=bytes(8), generations=bytes(8), base_lengths=bytes(4), counts=bytes(4))
    long.token_ids = bytes(1 << 23)
    with pytest.raises(ProtocolError, match="tokens"):
        target_events_from_proto(pb.TargetEvents(events=[pb.TargetEvent(answers=long)]))
    with pytest.raises(ProtocolError, match="sessions must have at least one row"):
        target_events_from_proto(pb.TargetEvents(events=[pb.TargetEvent(answers=pb.StepAnswers())]))


def test_positions_with_logprobs_are_bounded_before_anything_is_made_of_them() -> None:
    count = LINK_FIELDS.most + 1
    message = target_events_to_proto(ports.EventBatch((with_logprobs(1, num_prompt=1),)))
    batched = answers_of(message)[0].details.prompt_logprobs
    batched.num_positions = count.to_bytes(4, "little")
    batched.counts = batched.top_counts = bytes(4 * count)
    with pytest.raises(ProtocolError, match=f"prompt_logprobs has {count} positions"):
        target_events_from_proto(message)


@pytest.mark.parametrize("field", ["hidden_states"])
def test_lists_of_rows_have_one_entry_for_each(field: str) -> None:
    message, _ = sent([inline(greedy(1))])
    getattr(answers_of(message)[0].details, field).add()
    with pytest.raises(ProtocolError, match=f"{field} are not one for each of 1 rows"):
        target_events_from_proto(message)


def test_no_token_outside_a_support_travels() -> None:
    events = [sampled(index, 1) for index in range(4)]
    for event in events:
        event.form.outside_token_ids[0] = -1  # type: ignore[union-attr]
    message, batch = sent(events)
    assert len(message.events) == 1
    assert list(map(plain, batch.all_events())) == list(map(plain, events))


def test_random_columns_are_read_or_refused() -> None:
    """Nothing but ``ProtocolError`` comes of them, and what is read has an answer for each row."""
    chance = random.Random(5)
    num_read = 0
    for _ in range(3000):
        kind: Callable[[int], ports.Scores] = chance.choice(
            [greedy, sampled, lambda index: sampled(index, index % 3), typical, with_logprobs]
        )
        message, _ = sent([kind(index) for index in range(chance.choice([1, 4, 6]))])
        own = answers_of(message)[0]
        for _ in range(chance.choice([1, 2])):
            group: Any = own
            name = chance.choice(COLUMNS)
            if own.details.HasField("logprobs") and chance.random() < 0.7:
                group, name = own.details.logprobs, chance.choice(CANDIDATES)
            content = bytearray(getattr(group, name))
            if content and chance.random() < 0.6:
                content[chance.randrange(len(content))] = chance.randrange(256)
            else:
                content = bytearray(chance.randbytes(chance.choice([0, 1, 4, 8, 24, 32, 48])))
            setattr(group, name, bytes(content))
        try:
            events = target_events_from_proto(message).all_events()
        except ProtocolError:
            continue
        num_read += 1
        assert len(events) == len(own.sessions) // 8
        assert all(isinstance(event, ports.Scores) for event in events)
    assert 300 < num_read < 2700


class OneBatch:
    """A link that has one batch of events to tell."""

    num_pages_free = None
    stall = NO_STALL

    def __init__(self, events: Sequence[ports.TargetEvent]) -> None:
        self._events = events

    def send(self, commands: Sequence[ports.TargetCommand]) -> None:
        raise AssertionError("nothing was to be sent")

    async def events(self) -> AsyncIterator[ports.EventBatch[ports.TargetEvent]]:
        yield ports.EventBatch(tuple(self._events), REPORT, tuple(map(timing, self._events)))

    async def close(self) -> None:
        pass


async def no_requests() -> AsyncIterator[pb.TargetCommands]:
    await asyncio.Event().wait()
    yield pb.TargetCommands()


@pytest.mark.parametrize(("most", "is_one"), [(1 << 20, True), (1500, False)])
async def test_answers_that_are_longer_than_a_message_are_cut_by_rows(most: int, is_one: bool) -> None:
    events = [greedy(index, 9) for index in range(64)]
    pump = LinkPump(
        OneBatch(events),
        target_commands_from_proto,
        target_events_to_proto,
        max_message_bytes=most,
    )
    stream, messages, told = pump.run(no_requests()), list[Any](), dict[int, Any]()
    async with asyncio.timeout(120):
        while len(told) < len(events):
            messages.append(await anext(stream))
            told |= timed_events(target_events_from_proto(messages[-1]))
    await stream.aclose()
    assert told == {event.session: (event, timing(event)) for event in events}
    assert (len(messages) == 1) is is_one
    assert all(message.ByteSize() <= most for message in messages)


async def test_a_remote_target_answers_as_one_of_this_process(serve: Serve) -> None:
    vocab, num_sessions, prompt = 9, 8, (1, 2, 3)
    rows = random_rows(vocab, seed=1)
    server = await serve("target", ToyTarget(rows, vocab))
    told = [
        await two_steps(port, num_sessions, prompt, vocab)
        for port in (RemoteTarget(server.address), ToyTarget(rows, vocab))
    ]
    assert told[0] == told[1]


async def two_steps(
    port: Any, num_sessions: int, prompt: tuple[int, ...], vocab: int
) -> list[dict[int, tuple[int, tuple[int, ...]]]]:
    """Base length and tokens of each step, by session."""
    link = await port.attach()
    events = link.events()
    told: list[dict[int, tuple[int, tuple[int, ...]]]] = []
    async with asyncio.timeout(120):
        for generation in (2, 3):
            scores = [
                ports.Score(session, generation, 0, EMPTY_PREFIX, (*prompt, session % vocab), (4, 5))
                for session in range(num_sessions)
            ]
            opens = [
                opening(session, judging_rule=JudgingRule.GREEDY, num_token_ids=vocab)
                for session in range(num_sessions)
            ]
            link.send([*opens, *scores] if generation == 2 else scores)
            found: dict[int, tuple[int, tuple[int, ...]]] = {}
            while len(found) < num_sessions:
                for event in (await anext(events)).all_events():
                    if isinstance(event, ports.Scores) and isinstance(event.form, TokenScores):
                        found[event.session] = event.base_length, event.form.token_ids
            told.append(found)
    await link.close()
    return told
