"""Answers of many sessions as columns: the same values as one by one, and every malformed column a clear error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from outrider import ports
from outrider.columns import FEWEST_PLAIN_ROWS, AnswerColumns
from outrider.errors import ProtocolError
from outrider.limits import LINK_DRAFT_TOKEN_IDS, LINK_ITEMS, LINK_POSITIONS
from outrider.planes import ID_BYTES, PlaneReference
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.stalls import NO_STALL
from outrider.transport import remote
from outrider.transport.convert.columns import CAPABILITY, column_groups, reads_columns
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
    DenseScores,
    HiddenStates,
    JudgingRule,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)
from outrider.v1 import link_pb2 as pb
from tests.support.scripted_ports import ToyTarget, random_rows
from tests.transport.conftest import Serve
from tests.transport.test_links import opening

REPORT = ports.ForwardReport(1, 2, 3, 4, 5, 6, 7, 8)
COLUMNS = (
    "sessions",
    "generations",
    "base_lengths",
    "counts",
    "token_ids",
    "outside_mass",
    "support_sizes",
    "support_probs",
)
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


def with_logprobs(session: int) -> ports.Scores:
    ids, values = np.array([1, 2], dtype=np.int32), np.array([-1.0, -2.0], dtype=np.float32)
    return ports.Scores(session, 1, 2, TokenScores((1,)), (CandidateLogprobs(ids, values, ids, ids, values),))


def plain(event: Any) -> Any:
    """Values that can be compared."""
    parts: Any
    if isinstance(event, ports.Scores) and isinstance(event.form, SparseScores):
        parts = (event.form.support_probs, event.form.outside_mass, event.form.outside_token_ids)
        return event.session, event.generation, event.base_length, [(part.dtype, part.tolist()) for part in parts]
    if isinstance(event, ports.Scores) and event.logprobs:
        return event.session, event.logprobs[0].ranks.tolist()
    if isinstance(event, ports.Scores) and isinstance(event.form, TypicalScores):
        return event.session, event.form.argmax_token_ids.tolist()
    if isinstance(event, ports.Proposal) and isinstance(event.evidence, SparseEvidence):
        parts = (event.evidence.counts, event.evidence.token_ids, event.evidence.probs)
        return event.session, event.base_length, event.token_ids, [(part.dtype, part.tolist()) for part in parts]
    return event


def timing(event: Any) -> ports.ItemTiming:
    return ports.ItemTiming(event.session, 2, 3, 4, 5)


def sent(events: list[Any], *, timed: bool = True) -> tuple[pb.TargetEvents, ports.EventBatch[Any]]:
    batch = ports.EventBatch(tuple(events), REPORT, tuple(map(timing, events)) if timed else ())
    message = target_events_to_proto(batch, columns=True)
    return message, target_events_from_proto(pb.TargetEvents.FromString(message.SerializeToString()))


def test_steady_answers_go_as_columns_and_come_back_equal() -> None:
    events = [greedy((1 << 63) + index, index % 4) for index in range(32)]
    message, batch = sent(events)
    assert (len(message.events), len(message.columns)) == (0, 1)
    assert batch == ports.EventBatch(tuple(events), REPORT, tuple(map(timing, events)))


def test_the_largest_values_of_each_column_travel() -> None:
    largest = [ports.Scores((1 << 64) - 1 - index, (1 << 64) - 1, LAST, TokenScores((LAST,))) for index in range(4)]
    assert list(sent(largest)[1].events) == largest


def with_states(event: ports.Scores, plane: int = 0) -> ports.Scores:
    reference = PlaneReference(bytes([plane]) * ID_BYTES, 64 * event.session, 24, event.session + 5)
    event.hidden_states = HiddenStates(event.base_length - 1, 3, 4, "bfloat16", b"", (reference,))  # type: ignore[misc]
    return event


def test_scores_with_states_go_as_columns_by_plane_and_come_back_equal() -> None:
    events = [with_states(greedy(index), index % 2) for index in range(32)]
    message, batch = sent(events)
    assert (len(message.events), len(message.columns)) == (0, 2)
    assert sorted(batch.events, key=lambda event: event.session) == events
    drawn_events = [with_states(sampled(index, 2)) for index in range(8)]
    message, batch = sent(drawn_events)
    assert len(message.columns) == 1
    assert [event.hidden_states for event in batch.events] == [event.hidden_states for event in drawn_events]


def test_columns_of_scores_with_states_stay_columns() -> None:
    events = [with_states(greedy(index, 2 + index % 3)) for index in range(8)]
    message, _ = sent(events)
    (kept,) = target_events_from_proto(message, keeps_columns=True).columns
    assert list(kept.events(range(8))) == events
    again = target_events_to_proto(ports.EventBatch((), None, (), (kept,)), columns=True)
    assert target_events_from_proto(again).events == tuple(events)
    message.columns[0].states.starts = b""
    for keeps_columns in (True, False):
        with pytest.raises(ProtocolError, match="starts"):
            target_events_from_proto(message, keeps_columns=keeps_columns)


def test_proposals_have_no_states() -> None:
    batch: Any = ports.EventBatch(tuple(ports.Proposal(index, 1, 2, (3,)) for index in range(8)))
    message = draft_events_to_proto(batch, columns=True)
    message.columns[0].states.width = 1
    for keeps_columns in (True, False):
        with pytest.raises(ProtocolError, match="states and draft_token_ids belong to scores"):
            draft_events_from_proto(message, keeps_columns=keeps_columns)


def test_sampled_steps_without_drafts_go_as_columns() -> None:
    events = [sampled(index) for index in range(8)]
    message, batch = sent(events)
    assert len(message.columns) == 1 and message.columns[0].outside_mass
    assert list(map(plain, batch.events)) == list(map(plain, events))


def test_sampled_steps_without_drafts_may_stay_columns() -> None:
    events = [sampled(index) for index in range(8)]
    events[3].form.outside_token_ids[0] = -1  # type: ignore[union-attr]
    message, _ = sent(events)
    batch = target_events_from_proto(message, keeps_columns=True)
    assert not batch.events and len(batch.columns) == 1
    assert list(map(plain, batch.columns[0].events(range(8)))) == list(map(plain, events))
    again = target_events_to_proto(batch, columns=True)
    assert again == message


def test_answers_of_several_forms_stay_columns_each() -> None:
    tokens, drawn_ones, odd = [greedy(index) for index in range(6)], [sampled(index) for index in range(10, 14)], 20
    events = [with_logprobs(odd), *tokens, *drawn_ones]
    message, _ = sent(events)
    batch = target_events_from_proto(message, keeps_columns=True)
    assert [len(columns.sessions) for columns in batch.columns] == [6, 4]
    assert batch.sessions_in_columns == [event.session for event in events[1:]]
    found, told = list(batch.events), list(batch.timings)
    for columns in batch.columns:
        places = range(len(columns.sessions))
        found += columns.events(places)
        told += [one for one in columns.timings(places) if one is not None]
    assert list(map(plain, found)) == list(map(plain, events))
    assert told == list(map(timing, events))
    assert target_events_to_proto(batch, columns=True) == message
    assert target_events_to_proto(batch).item_timings_ns == message.item_timings_ns
    del message.item_timings_ns[-1]
    with pytest.raises(ProtocolError, match="five for each"):
        target_events_from_proto(message, keeps_columns=True)


def kept(events: list[Any]) -> AnswerColumns[Any]:
    """The events as columns that were sent as such, and again."""
    batch: ports.EventBatch[Any] = ports.EventBatch(tuple(events))
    for _ in range(2):
        if isinstance(events[0], ports.Proposal):
            batch = draft_events_from_proto(draft_events_to_proto(batch, columns=True), keeps_columns=True)
        else:
            batch = target_events_from_proto(target_events_to_proto(batch, columns=True), keeps_columns=True)
        assert not batch.events
    (columns,) = batch.columns
    return columns


@pytest.mark.parametrize(
    "events",
    [
        [sampled(index, index % 4) for index in range(9)],
        [drawn(index, [3, 0, 2][: 1 + index % 3]) for index in range(9)],
        [greedy(index, index % 4) for index in range(9)],
    ],
)
def test_answers_of_any_lengths_may_stay_columns_and_be_selected(events: list[Any]) -> None:
    columns = kept(events)
    assert list(map(plain, columns.events(range(9)))) == list(map(plain, events))
    chosen = columns.selected(np.array([7, 1, 2]))
    assert list(map(plain, chosen.events(range(3)))) == [plain(events[place]) for place in (7, 1, 2)]


@pytest.mark.parametrize("timed", [True, False])
def test_what_is_not_steady_goes_one_by_one_beside_columns(timed: bool) -> None:
    events: list[Any] = []
    for index in range(0, 60, 5):
        events += [greedy(index), sampled(index + 1), with_logprobs(index + 2), typical(index + 3)]
        events.append(ports.Preempted(index + 4, 1, 10))
    message, batch = sent(events, timed=timed)
    assert (len(message.events), len(message.columns)) == (36, 2)
    found = {event.session: (plain(event), time) for event, time in batch.timed()}
    assert found == {event.session: (plain(event), timing(event) if timed else None) for event in events}


def test_sampled_steps_of_any_draft_lengths_go_as_columns() -> None:
    events = [sampled(index, index % 5) for index in range(20)]
    message, batch = sent(events)
    assert (len(message.events), len(message.columns)) == (0, 1)
    assert list(map(plain, batch.events)) == list(map(plain, events))


def test_proposals_go_as_columns_with_and_without_evidence() -> None:
    bare = [ports.Proposal(index, 2, 9, tuple(range(index))) for index in range(6)]
    with_evidence = [
        drawn(10 + index, [1 + (index + place) % 4 for place in range(1 + index % 3)]) for index in range(6)
    ]
    torn = drawn(20, [2, 2])
    torn.evidence.counts[0] = 1  # type: ignore[union-attr]
    message = draft_events_to_proto(ports.EventBatch((*with_evidence, torn, *bare)), columns=True)
    assert (len(message.events), len(message.columns)) == (1, 2)
    found = {event.session: plain(event) for event in draft_events_from_proto(message).events}
    assert found == {event.session: plain(event) for event in (*bare, *with_evidence, torn)}
    message.columns[0].outside_mass = bytes(24)
    with pytest.raises(ProtocolError, match="outside_mass"):
        draft_events_from_proto(message)


def test_few_plain_answers_and_two_of_one_session_and_rows_of_probabilities_go_one_by_one() -> None:
    for few in (1, FEWEST_PLAIN_ROWS - 1):
        assert not column_groups([greedy(index, 1) for index in range(few)])
        assert not column_groups([sampled(index) for index in range(few)])
        assert not column_groups([ports.Proposal(index, 2, 9, ()) for index in range(few)])
    assert not column_groups([*(greedy(index) for index in range(8)), ports.Opened(3, 1, 0)])
    dense = ports.Scores(99, 1, 1, DenseScores(np.ones((1, 4), dtype=np.float32)))
    assert not column_groups([*(greedy(index) for index in range(8)), dense])


def test_a_single_answer_about_drafts_is_a_column_and_takes_plain_ones_of_its_form_along() -> None:
    events = [greedy(1, 1), greedy(2, 3), sampled(3), sampled(4, 2)]
    assert column_groups(events) == [[0, 1], [2, 3]]
    for event in (greedy(1, 2), sampled(1, 1)):
        message, batch = sent([event])
        assert (len(message.events), len(message.columns)) == (0, 1)
        assert plain(batch.events[0]) == plain(event)
    for proposal in (ports.Proposal(1, 2, 9, (3,)), drawn(1, [2])):
        proposed = draft_events_to_proto(ports.EventBatch((proposal,)), columns=True)
        assert (len(proposed.events), len(proposed.columns)) == (0, 1)
        assert plain(draft_events_from_proto(proposed).events[0]) == plain(proposal)


def test_a_reader_that_does_not_ask_gets_none() -> None:
    message = target_events_to_proto(ports.EventBatch(tuple(greedy(index) for index in range(8))))
    assert (len(message.events), len(message.columns)) == (8, 0)
    assert reads_columns([("a", "b"), CAPABILITY]) and not reads_columns([("a", "b")]) and not reads_columns(None)


def test_an_answer_that_is_too_long_ends_its_session_alone() -> None:
    events = [greedy(index, LINK_POSITIONS.most + (index == 2)) for index in range(5)]
    found = sent(events)[1].events
    assert isinstance(found[2], ports.SessionFailed) and found[2].session == 2
    assert [event for index, event in enumerate(found) if index != 2] == [*events[:2], *events[3:]]
    drafts = tuple(ports.Proposal(index, 1, 1, (5,) * (LINK_DRAFT_TOKEN_IDS.most + 1)) for index in range(4))
    failed = draft_events_from_proto(draft_events_to_proto(ports.EventBatch(drafts), columns=True)).events
    assert all(isinstance(event, ports.SessionFailed) for event in failed)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("change", [-1, 1, -4, 8])
def test_columns_that_do_not_fit_each_other_are_told(name: str, change: int) -> None:
    for events in ([greedy(index) for index in range(8)], [sampled(index) for index in range(8)]):
        message, _ = sent(events)
        content = getattr(message.columns[0], name)
        if not content:
            continue
        setattr(message.columns[0], name, content[:change] if change < 0 else content + bytes(change))
        with pytest.raises(ProtocolError, match="columns"):
            target_events_from_proto(message)


def test_counts_and_items_are_bounded_before_anything_is_made_of_them() -> None:
    message, _ = sent([greedy(index) for index in range(4)], timed=False)
    message.columns[0].counts = np.array([LAST, LAST, 2, 9], dtype="<u4").tobytes()  # their sum is 9 in 32 bits
    with pytest.raises(ProtocolError, match="token_ids"):
        target_events_from_proto(message)
    many = pb.TargetEvents(columns=[pb.AnswerColumns(sessions=bytes(8 * LINK_ITEMS.most))] * 2)
    with pytest.raises(ProtocolError, match=f"at most {LINK_ITEMS.most}"):
        target_events_from_proto(many)
    with pytest.raises(ProtocolError, match="tokens"):
        target_events_from_proto(pb.TargetEvents(columns=[pb.AnswerColumns(token_ids=bytes(1 << 23))]))


def test_no_token_outside_a_support_travels() -> None:
    events = [sampled(index, 1) for index in range(4)]
    for event in events:
        event.form.outside_token_ids[0] = -1  # type: ignore[union-attr]
    message, batch = sent(events)
    assert len(message.columns) == 1
    assert list(map(plain, batch.events)) == list(map(plain, events))


def test_random_columns_are_read_or_refused() -> None:
    """Nothing but ``ProtocolError`` comes of them, and what is read has an answer for each row."""
    chance = random.Random(5)
    num_read = 0
    for _ in range(3000):
        kind: Callable[[int], ports.Scores] = chance.choice([greedy, sampled, lambda index: sampled(index, index % 3)])
        message, _ = sent([kind(index) for index in range(chance.choice([4, 6]))], timed=False)
        group = message.columns[0]
        for _ in range(chance.choice([1, 2])):
            name = chance.choice(COLUMNS)
            content = bytearray(getattr(group, name))
            if content and chance.random() < 0.6:
                content[chance.randrange(len(content))] = chance.randrange(256)
            else:
                content = bytearray(chance.randbytes(chance.choice([0, 1, 4, 8, 24, 32, 48])))
            setattr(group, name, bytes(content))
        try:
            events = target_events_from_proto(message).events
        except ProtocolError:
            continue
        kept = target_events_from_proto(message, keeps_columns=True)
        for columns in kept.columns:
            assert list(map(repr, columns.events(range(len(events))))) == list(map(repr, events))
        num_read += 1
        assert len(events) == len(group.sessions) // 8
        assert all(isinstance(event, ports.Scores | ports.SessionFailed) for event in events)
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


@pytest.mark.parametrize(
    ("most", "columns", "is_one"), [(1 << 20, True, True), (1500, True, False), (1500, False, False)]
)
async def test_columns_that_are_longer_than_a_message_go_one_by_one(most: int, columns: bool, is_one: bool) -> None:
    events = [greedy(index, 9) for index in range(64)]
    pump = LinkPump(
        OneBatch(events),
        target_commands_from_proto,
        target_events_to_proto,
        offer=lambda name: None,
        shares_memory=False,
        max_message_bytes=most,
        columns=columns,
    )
    stream, messages, told = pump.run(no_requests()), list[Any](), list[Any]()
    async with asyncio.timeout(30):
        while len(told) < len(events):
            messages.append(await anext(stream))
            told += target_events_from_proto(messages[-1]).events
    await stream.aclose()
    assert told == events
    assert (len(messages) == 1) is is_one
    assert [len(message.columns) for message in messages] == [int(is_one)] * len(messages)


async def test_a_coordinator_and_a_target_use_columns_from_the_second_step_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, num_sessions, prompt = 9, 8, (1, 2, 3)
    seen: list[int] = []

    def read(message: pb.TargetEvents, fetch: Any, *, keeps_columns: bool) -> ports.EventBatch[Any]:
        seen.append(len(message.columns))
        return target_events_from_proto(message, fetch, keeps_columns=keeps_columns)

    monkeypatch.setattr(remote, "target_events_from_proto", read)
    rows = random_rows(vocab, seed=1)
    server = await serve("target", ToyTarget(rows, vocab))
    told = [
        await two_steps(port, num_sessions, prompt, vocab)
        for port in (RemoteTarget(server.address), ToyTarget(rows, vocab))
    ]
    assert told[0] == told[1]
    assert 0 < sum(seen) <= len(seen)


async def two_steps(
    port: Any, num_sessions: int, prompt: tuple[int, ...], vocab: int
) -> list[dict[int, tuple[int, tuple[int, ...]]]]:
    """Of each step the base length and the tokens by session."""
    link = await port.attach()
    events = link.events()
    told: list[dict[int, tuple[int, tuple[int, ...]]]] = []
    async with asyncio.timeout(30):
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
                for event in (await anext(events)).events:
                    if isinstance(event, ports.Scores) and isinstance(event.form, TokenScores):
                        found[event.session] = event.base_length, event.form.token_ids
            told.append(found)
    await link.close()
    return told
