"""Both ends over a real socket: proposals meet the scores that wait for them, and nothing waits for good."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import I4, U4, U8, AnswerBatch, ScoreAhead, ScoreBatch, SupportBatch
from outrider.boot_id import channel_host
from outrider.limits import Bound
from outrider.planes import ID_BYTES
from outrider.ports import (
    ChannelState,
    CloseChannel,
    EventBatch,
    OfferChannel,
    Proposal,
    RequestChannel,
    SessionLost,
)
from outrider.proposal_channel import messages
from outrider.proposal_channel import receiver as receiving
from outrider.proposal_channel.messages import take_proposals, to_bytes
from outrider.proposal_channel.pushes import Pushes, pushes_in, text_hash
from outrider.proposal_channel.pushes import to_bytes as pushes_to_bytes
from outrider.proposal_channel.receiver import MAX_CHANNELS, MAX_WAITING, ProposalReceiver
from outrider.proposal_channel.sender import ProposalSender
from outrider.tensor_plane.control import connect

DEADLINE_S = 240.0
LINK = 3


@dataclass
class Ends:
    """A target's end and a draft's, and what both have said."""

    receiver: ProposalReceiver
    sender: ProposalSender = field(default_factory=ProposalSender)
    from_target: queue.Queue[Any] = field(default_factory=queue.Queue)
    from_draft: queue.Queue[Any] = field(default_factory=queue.Queue)
    scored: queue.Queue[Any] = field(default_factory=queue.Queue)
    verdicts: queue.Queue[Any] = field(default_factory=queue.Queue)

    def tell_target(self, command: Any) -> None:
        self.receiver.handle(LINK, command, self.from_target.put, self.scored.put)

    def tell_draft(self, command: Any) -> None:
        self.sender.handle(LINK, command, self.from_draft.put, self.verdicts.put)

    def offer(self, connection: int = 1) -> OfferChannel:
        self.tell_target(RequestChannel(connection, wants_verdicts=True))
        found = self.from_target.get(timeout=DEADLINE_S)
        assert isinstance(found, OfferChannel)
        return found

    def open(self, connection: int = 1) -> None:
        self.tell_draft(self.offer(connection))
        assert self.from_draft.get(timeout=DEADLINE_S) == ChannelState(connection, is_open=True)

    def send(self, batched: AnswerBatch[Proposal]) -> AnswerBatch[Proposal]:
        (sent,) = self.sender.send(LINK, EventBatch((), None, (), (batched,))).batched
        return sent

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends(ProposalReceiver(patience_s=60.0))
    yield found
    found.close()


def proposals(
    generations: list[int], lengths: list[int], *, channel: int = 1, supports: bool = False
) -> AnswerBatch[Proposal]:
    num_tokens = sum(lengths)
    counts = np.arange(num_tokens, dtype=I4) % 3
    return AnswerBatch(
        np.arange(len(lengths), dtype=U8) + 7,
        np.array(generations, dtype=U8),
        np.full(len(lengths), 20, dtype=U4),
        np.array(lengths, dtype=U4),
        np.arange(num_tokens, dtype=U4) + 1000,
        (),
        Proposal,
        supports=SupportBatch(counts, np.arange(int(counts.sum()), dtype=I4), np.zeros(int(counts.sum()), dtype="<f4"))
        if supports
        else None,
        channel=channel,
    )


def ahead(generations: list[int], lengths: list[int], *, channel: int = 1) -> ScoreAhead:
    size = len(lengths)
    batched = ScoreBatch(
        np.arange(size, dtype=U8) + 7,
        np.array(generations, dtype=U8) + 1,
        np.full(size, 19, dtype=U4),
        b"",
        np.arange(size, dtype=U8),
        np.ones(size, dtype=U4),
        np.arange(size, dtype=I4),
        np.array(lengths, dtype=U4),
        np.zeros(0, dtype=U4),
    )
    return ScoreAhead(batched, channel, np.array(generations, dtype=U8))


def check_whole(scored: ScoreBatch, sent: AnswerBatch[Proposal], waited: ScoreAhead) -> None:
    assert scored.is_direct
    assert scored.draft_token_ids.tolist() == sent.token_ids.tolist()
    assert scored.draft_lengths.tolist() == sent.counts.tolist()
    assert scored.generations.tolist() == waited.batched.generations.tolist()
    assert scored.hash_tails.tolist() == waited.batched.hash_tails.tolist()
    if sent.supports is None:
        assert scored.support_counts is None
    else:
        assert scored.support_counts is not None and scored.support_token_ids is not None
        assert scored.support_counts.tolist() == sent.supports.counts.tolist()
        assert scored.support_token_ids.tolist() == sent.supports.token_ids.tolist()


def eventually(condition: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def only_channel(receiver: ProposalReceiver) -> Any:
    (channel,) = receiver._channels.values()
    return channel


def stuck(receiver: ProposalReceiver) -> Any:
    """The thread of the only channel reads nothing as long as this is held."""
    return only_channel(receiver)._lock


def waiting_at(ends: Ends, name: str) -> int:
    return len(getattr(only_channel(ends.receiver), name))


@pytest.mark.parametrize("supports", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_proposals_and_scores_meet_in_either_order(ends: Ends, *, is_early: bool, supports: bool) -> None:
    ends.open()
    for round_number in range(5):
        generations, lengths = [round_number, 90 + round_number], [3, 1 + round_number]
        sent, waited = proposals(generations, lengths, supports=supports), ahead(generations, lengths)
        if is_early:
            assert ends.send(sent).channel == 1
            eventually(lambda: waiting_at(ends, "_early"))
        ends.tell_target(waited)
        if not is_early:
            assert ends.send(sent).channel == 1
        check_whole(ends.scored.get(timeout=DEADLINE_S), sent, waited)
    assert not waiting_at(ends, "_early") and not waiting_at(ends, "_waiting")


def test_answers_of_no_channel_are_not_sent(ends: Ends) -> None:
    ends.open()
    for batched in (proposals([1], [2], channel=0), proposals([1], [2], channel=9)):
        assert ends.send(batched).channel == 0
    assert ends.sender.readings()[0].value == 0
    ends.send(proposals([1], [2]))
    assert ends.sender.readings()[0].value == 1


def test_fewer_tokens_than_were_asked_for_are_not_scored(ends: Ends) -> None:
    ends.open()
    ends.tell_target(ahead([1, 2], [3, 3]))
    ends.send(proposals([1, 2], [3, 2]))
    ends.tell_target(ahead([3, 4], [2, 2]))
    sent = proposals([3, 4], [2, 2])
    ends.send(sent)
    check_whole(ends.scored.get(timeout=DEADLINE_S), sent, ahead([3, 4], [2, 2]))
    assert ends.scored.empty() and ends.from_target.empty()


@pytest.mark.parametrize("supports", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_some_proposals_are_scored_without_the_others(ends: Ends, *, is_early: bool, supports: bool) -> None:
    ends.open()
    waited, sent = ahead([1, 2, 3], [3, 1, 2]), proposals([1, 2, 3], [3, 1, 2], supports=supports)
    some, other = np.array([2, 0]), np.array([1])
    if is_early:
        ends.send(replace(sent.selected(some), channel=1))
        eventually(lambda: waiting_at(ends, "_early"))
    ends.tell_target(waited)
    if not is_early:
        ends.send(replace(sent.selected(some), channel=1))
    check_whole(ends.scored.get(timeout=DEADLINE_S), sent.selected(some), waited.selected(some.tolist()))
    assert waiting_at(ends, "_waiting") == 1
    ends.send(replace(sent.selected(other), channel=1))
    check_whole(ends.scored.get(timeout=DEADLINE_S), sent.selected(other), waited.selected(other.tolist()))
    assert not waiting_at(ends, "_early") and not waiting_at(ends, "_waiting")


def test_proposals_of_which_one_is_not_waited_for_are_not_scored(ends: Ends) -> None:
    ends.open()
    ends.tell_target(ahead([1, 2], [3, 3]))
    ends.send(proposals([1, 9], [3, 3]))
    eventually(lambda: waiting_at(ends, "_early"))
    ends.send(proposals([1], [2]))  # other than was asked for
    eventually(lambda: waiting_at(ends, "_early") == 2)
    ends.send(proposals([1], [3]))
    check_whole(ends.scored.get(timeout=DEADLINE_S), proposals([1], [3]), ahead([1], [3]))
    assert ends.scored.empty() and waiting_at(ends, "_waiting") == 1


def test_what_is_left_of_scores_is_given_up_alone() -> None:
    ends = Ends(ProposalReceiver(patience_s=2.5))  # a busy machine brings the others in time
    try:
        ends.open()
        ends.tell_target(ahead([1, 2], [3, 3]))
        ends.send(proposals([1], [3]))
        lost = ends.from_target.get(timeout=DEADLINE_S)
        assert isinstance(lost, SessionLost) and (lost.session, lost.generation) == (8, 3)
        assert ends.from_target.empty() and not waiting_at(ends, "_waiting")
    finally:
        ends.close()


def test_a_channel_that_ends_says_so_before_what_it_gives_up(ends: Ends) -> None:
    ends.open()
    ends.tell_target(ahead([1, 2], [3, 3]))
    ends.sender.close()
    state, *lost = [ends.from_target.get(timeout=DEADLINE_S) for _ in range(3)]
    assert isinstance(state, ChannelState) and not state.is_open and "closed" in state.reason
    assert [(each.session, each.generation) for each in lost] == [(7, 2), (8, 3)]
    assert all(isinstance(each, SessionLost) for each in lost)
    ends.tell_target(ahead([5], [3]))  # what is on its way meanwhile
    late = ends.from_target.get(timeout=DEADLINE_S)
    assert isinstance(late, SessionLost) and (late.session, late.generation) == (7, 6)


def test_what_was_sent_before_the_draft_died_is_scored(ends: Ends) -> None:
    ends.open()
    sent = proposals([1], [3])
    ends.send(sent)
    ends.sender.close()
    state = ends.from_target.get(timeout=DEADLINE_S)
    assert isinstance(state, ChannelState) and not state.is_open
    ends.tell_target(ahead([1], [3]))
    check_whole(ends.scored.get(timeout=DEADLINE_S), sent, ahead([1], [3]))


def test_scores_do_not_wait_for_good() -> None:
    ends = Ends(ProposalReceiver(patience_s=2.5))
    try:
        ends.open()
        ends.tell_target(ahead([1], [3]))
        lost = ends.from_target.get(timeout=DEADLINE_S)
        assert isinstance(lost, SessionLost) and lost.generation == 2 and "2.5 s" in lost.reason
        sent = proposals([4], [2])  # the channel goes on
        ends.tell_target(ahead([4], [2]))
        ends.send(sent)
        check_whole(ends.scored.get(timeout=DEADLINE_S), sent, ahead([4], [2]))
    finally:
        ends.close()


def test_no_more_waits_than_there_is_room_for(ends: Ends) -> None:
    ends.open()
    for number in range(MAX_WAITING + 1):
        waited = ahead([number], [2])
        batched = replace(waited.batched, sessions=np.array([100 + number], dtype=U8))
        ends.tell_target(replace(waited, batched=batched))
    lost = ends.from_target.get(timeout=DEADLINE_S)
    assert isinstance(lost, SessionLost) and lost.generation == 1
    assert waiting_at(ends, "_waiting") == MAX_WAITING
    for number in range(MAX_WAITING + 40):
        ends.send(proposals([1000 + number], [2]))
    eventually(lambda: waiting_at(ends, "_early") == MAX_WAITING)


def test_scores_for_a_channel_that_is_not_there_are_given_up(ends: Ends) -> None:
    ends.tell_target(ahead([1], [2], channel=5))
    assert isinstance(ends.from_target.get(timeout=DEADLINE_S), SessionLost)


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("how", ["command", "link"])
def test_either_side_may_end_a_channel(ends: Ends, side: str, how: str) -> None:
    ends.open()
    end = ends.receiver if side == "target" else ends.sender
    if how == "link":
        end.drop_link(LINK)
    elif side == "target":
        ends.tell_target(CloseChannel(1))
    else:
        ends.tell_draft(CloseChannel(1))
    if side == "target":
        state = ends.from_target.get(timeout=DEADLINE_S)
        assert state == ChannelState(1, is_open=False, reason="it was ended")
        # The draft finds out when it sends; nothing is left waiting for what it sends until then.
        eventually(lambda: ends.send(proposals([1], [2])).channel == 0)
        told = ends.from_draft.get(timeout=DEADLINE_S)
        assert isinstance(told, ChannelState) and not told.is_open
    else:
        assert ends.send(proposals([1], [2])).channel == 0
        state = ends.from_target.get(timeout=DEADLINE_S)
        assert isinstance(state, ChannelState) and not state.is_open
    ends.open(2)  # and another one may follow


def test_strangers_get_no_channel(ends: Ends) -> None:
    offered = ends.offer()
    ends.tell_draft(replace(offered, offer=replace(offered.offer, token=bytes(ID_BYTES))))
    state = ends.from_draft.get(timeout=DEADLINE_S)
    assert isinstance(state, ChannelState) and not state.is_open
    assert ends.send(proposals([1], [2])).channel == 0


@pytest.mark.parametrize(
    "content",
    [
        bytes(16),
        to_bytes(proposals([1], [2]))[:4] + b"\xff" * 12,
        b"\x01\x00\x00\x00\x03\x00\x00\x00" + bytes(8 + 16) + b"\x02\x00\x00\x00" + bytes(12),
    ],
    ids=["no sessions", "sizes", "sums"],
)
def test_what_is_no_message_ends_the_channel(ends: Ends, content: bytes) -> None:
    connected = connect(ends.offer().offer).detach()
    connected.sendall(content)
    state = ends.from_target.get(timeout=DEADLINE_S)
    assert isinstance(state, ChannelState) and not state.is_open
    connected.close()


def test_half_a_message_does_not_stay(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "TICK_S", 0.02)
    found = Ends(ProposalReceiver(patience_s=0.2))
    try:
        connected = connect(found.offer().offer).detach()
        connected.sendall(to_bytes(proposals([1], [2]))[:-3])
        state = found.from_target.get(timeout=DEADLINE_S)
        assert isinstance(state, ChannelState) and "rest of a message" in state.reason
        connected.close()
    finally:
        found.close()


def test_a_target_that_takes_nothing_is_not_waited_for(ends: Ends) -> None:
    ends.open()
    with stuck(ends.receiver):
        eventually(lambda: ends.send(proposals([1] * 64, [16] * 64)).channel == 0)
    state = ends.from_draft.get(timeout=DEADLINE_S)
    assert isinstance(state, ChannelState) and not state.is_open


def test_a_channel_ends_where_a_push_may_be_written_in_part(ends: Ends) -> None:
    ends.open()
    drawn = proposals([1] * 64, [16] * 64)
    nothing = np.zeros(64, dtype=U8)
    pushes = Pushes(drawn.sessions, drawn.base_lengths, nothing, drawn.counts, drawn.token_ids, channel=1)

    def has_ended() -> bool:
        assert not ends.sender.send(LINK, EventBatch((), batched=(pushes,))).batched  # type: ignore[arg-type]
        return not ends.from_draft.empty()

    with stuck(ends.receiver):  # with the proposals
        ends.send(proposals([1], [2]))
        eventually(has_ended)
    state = ends.from_draft.get(timeout=DEADLINE_S)
    assert isinstance(state, ChannelState) and not state.is_open


def test_connections_are_counted(ends: Ends) -> None:
    for number in range(1, MAX_CHANNELS + 1):
        ends.offer(number)
    ends.tell_target(RequestChannel(MAX_CHANNELS + 1))
    refused = ends.from_target.get(timeout=DEADLINE_S)
    assert isinstance(refused, ChannelState) and str(MAX_CHANNELS) in refused.reason


def test_the_host_is_told_by_its_kernel_and_network() -> None:
    assert channel_host() and channel_host() == channel_host()
    with socket.create_server(("127.0.0.1", 0)):
        assert channel_host().count("/") == 1


def test_scores_of_which_nobody_waits_any_more_are_forgotten(ends: Ends) -> None:
    ends.open()
    ends.tell_target(ahead([1, 2], [3, 3]))
    ends.tell_target(ahead([5], [3]))  # of one of the two alone: the other may still wait
    assert waiting_at(ends, "_waiting") == 2
    ends.tell_target(ahead([11, 12], [3, 3]))
    assert waiting_at(ends, "_waiting") == 1
    sent = proposals([11, 12], [3, 3])
    ends.send(sent)
    check_whole(ends.scored.get(timeout=DEADLINE_S), sent, ahead([11, 12], [3, 3]))
    assert ends.from_target.empty()


def test_proposals_of_which_nobody_hears_are_forgotten() -> None:
    ends = Ends(ProposalReceiver(patience_s=1.5))
    try:
        ends.open()
        ends.send(proposals([1], [2]))
        eventually(lambda: waiting_at(ends, "_early"))
        eventually(lambda: not waiting_at(ends, "_early"))
    finally:
        ends.close()


def test_supports_of_less_than_nothing_end_the_channel(ends: Ends) -> None:
    ends.open()
    batched = proposals([1], [2], supports=True)
    assert batched.supports is not None
    batched.supports.counts[:] = (-1, batched.supports.token_ids.size + 1)
    ends.tell_target(ahead([1], [2]))
    ends.send(batched)
    state = ends.from_target.get(timeout=DEADLINE_S)
    assert isinstance(state, ChannelState) and "do not add up" in state.reason
    assert ends.scored.empty()


def test_too_many_ids_go_by_the_coordinator_alone(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.open()
    monkeypatch.setattr(messages, "LINK_SUPPORT_IDS", Bound(2, "ids"))
    assert ends.send(proposals([1], [6], supports=True)).channel == 0
    assert ends.send(proposals([1], [6])).channel == 1


def pushes(rows: list[tuple[int, int, int, list[int]]]) -> Pushes:
    return Pushes(
        np.array([number for number, _, _, _ in rows], dtype=U8),
        np.array([base for _, base, _, _ in rows], dtype=np.int64),
        np.array([hashed for _, _, hashed, _ in rows], dtype=U8),
        np.array([len(ids) for _, _, _, ids in rows], dtype=U4),
        np.array([token_id for _, _, _, ids in rows for token_id in ids], dtype=U4),
    )


def test_pushes_are_read_as_they_were_written() -> None:
    rows = [(7, 12, 5, [1, 2, 3]), (1 << 40, 1 << 31, text_hash((1 << 61) - 1, 0), [4]), (9, 0, 0, [5, 6])]
    message = take_proposals(bytearray(pushes_to_bytes(pushes(rows))))
    assert message is not None
    found = pushes_in(message)
    assert found is not None and found.rows() == rows


def test_proposals_are_no_pushes() -> None:
    message = take_proposals(bytearray(to_bytes(proposals([1, 2], [2, 1]))))
    assert message is not None and pushes_in(message) is None


@pytest.mark.parametrize("begins_next", [False, True])
def test_pushes_are_taken_where_the_target_begins_steps_by_itself(ends: Ends, *, begins_next: bool) -> None:
    ends.tell_target(RequestChannel(1, wants_verdicts=True, begins_next=begins_next))
    ends.tell_draft(ends.from_target.get(timeout=DEADLINE_S))
    assert ends.from_draft.get(timeout=DEADLINE_S).is_open
    pushed = replace(pushes([(7, 12, 5, [1, 2, 3])]), channel=1)
    ends.sender.send(LINK, EventBatch((), batched=(pushed,)))  # type: ignore[arg-type]
    waited, sent = ahead([1], [2]), proposals([1], [2])
    ends.tell_target(waited)
    ends.send(sent)
    if begins_next:
        assert ends.scored.get(timeout=DEADLINE_S).rows() == pushed.rows()
    scored = ends.scored.get(timeout=DEADLINE_S)
    check_whole(scored, sent, waited)
    assert scored.begins_next is begins_next
