"""Verdicts: what a target tells a draft of its own tokens, as bytes and over a channel."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.batched import U4, U8, AnswerBatch, StateBatch, token_scores
from outrider.limits import LINK_COMMANDS
from outrider.planes import ID_BYTES
from outrider.ports import CloseChannel, EventBatch, OfferChannel, RequestChannel
from outrider.proposal_channel import sender as sending
from outrider.proposal_channel.messages import to_bytes as proposals_to_bytes
from outrider.proposal_channel.pushes import ChainStart
from outrider.proposal_channel.receiver import ProposalReceiver
from outrider.proposal_channel.verdicts import UNKNOWN, StateVerdicts, Verdicts, take_verdicts, to_bytes, verdicts_on
from tests.proposal_channel.test_channel import DEADLINE_S, LINK, Ends, eventually, only_channel, proposals


def scores(tokens: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]], *, channel: int = 1) -> AnswerBatch[Any]:
    size = len(tokens)
    return AnswerBatch(
        np.arange(size, dtype=U8) + 7,
        np.arange(size, dtype=U8) + 30,
        np.full(size, 20, dtype=U4),
        np.array([len(own) for own in tokens], dtype=U4),
        np.array([token_id for own in tokens for token_id in own], dtype=U4),
        (),
        token_scores,
        channel=channel,
        draft_token_ids=np.array([token_id for own in drafts for token_id in own], dtype=U4),
    )


def as_rows(verdicts: Verdicts) -> list[tuple[int, ...]]:
    return list(zip(*[getattr(verdicts, name).tolist() for name in Verdicts.__slots__], strict=True))


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends(ProposalReceiver(patience_s=60.0))
    yield found
    found.close()


def test_a_verdict_is_the_first_token_that_differs() -> None:
    found = verdicts_on(scores([[1, 2, 3], [1, 2, 3], [4, 5], [9, 9, 9, 9]], [[1, 2], [1, 7], [3], [9, 8, 9]]))
    assert found is not None
    assert as_rows(found) == [(7, 30, 20, 2, 2, 3), (8, 31, 20, 1, 1, 2), (9, 32, 20, 0, 3, 4), (10, 33, 20, 1, 9, 9)]


def test_verdicts_are_those_of_each_row_alone() -> None:
    chance = random.Random(5)
    for _ in range(200):
        counts = [chance.randint(1, 5) for _ in range(chance.randint(1, 9))]
        drafts = [[chance.randrange(3) for _ in range(count)] for count in counts]
        tokens = [[chance.randrange(3) for _ in range(count + 1)] for count in counts]
        found = verdicts_on(scores(tokens, drafts))
        assert found is not None
        for own, draft, row in zip(tokens, drafts, as_rows(found), strict=True):
            accepted = next((at for at, token_id in enumerate(draft) if own[at] != token_id), len(draft))
            assert (row[3], row[5]) == (accepted, own[accepted])
            assert not accepted or row[4] == draft[accepted - 1]


def test_there_are_none_where_the_coordinator_judges_or_brings_the_drafts() -> None:
    found = scores([[1, 2]], [[1]])
    assert verdicts_on(replace(found, outside_masses=np.zeros(2, dtype="<f4"))) is None
    assert verdicts_on(replace(found, draft_token_ids=None)) is None


def test_messages_are_read_whole_and_one_after_the_other() -> None:
    verdicts = [verdicts_on(scores([[1, 2], [3, 4]], [[1], [2]])), verdicts_on(scores([[5, 6]], [[5]]))]
    content = b"".join([to_bytes(each) for each in verdicts if each is not None])
    received, found = bytearray(), []
    for byte in content:
        received.append(byte)
        if (taken := take_verdicts(received)) is not None:
            found.append(as_rows(taken))
    assert found == [as_rows(each) for each in verdicts if each is not None]
    assert not received


def with_states(scored: AnswerBatch[Any], counts: Sequence[int]) -> AnswerBatch[Any]:
    """The scores with the states of so many positions each."""
    size = len(counts)
    offsets, sequences = np.arange(size, dtype=U8) * 4096, np.arange(size, dtype=U8) + (1 << 40)
    states = StateBatch(b"p" * ID_BYTES, 96, "bfloat16", scored.base_lengths - 1, np.array(counts), offsets, sequences)
    return replace(scored, states=states)


def test_states_travel_with_the_verdicts_beside_messages_without() -> None:
    plain = scores([[5, 6]], [[5]])
    sent = [plain, with_states(scores([[1, 2, 3], [4, 7]], [[1, 9], [8]]), [3, 2]), plain]
    received, found = bytearray(), list[Verdicts]()
    for byte in b"".join([to_bytes(each) for own in sent if (each := verdicts_on(own)) is not None]):
        received.append(byte)
        if (taken := take_verdicts(received)) is not None:
            found.append(taken)
    assert not received and [type(each) for each in found] == [Verdicts, StateVerdicts, Verdicts]
    own = found[1]
    assert isinstance(own, StateVerdicts) and as_rows(own) == [(7, 30, 20, 1, 1, 2), (8, 31, 20, 0, 3, 4)]
    assert own.draft_token_ids.tolist() == [1, 9, 8]
    assert list(own.states.hidden_states()) == list(sent[1].states.hidden_states())  # type: ignore[union-attr]


def test_states_of_other_positions_than_were_scored_do_not_travel() -> None:
    assert type(verdicts_on(with_states(scores([[1, 2]], [[1]]), [5]))) is Verdicts


@pytest.mark.parametrize("place", range(3))
def test_impossible_states_are_no_message(place: int) -> None:
    found = verdicts_on(with_states(scores([[1, 2]], [[1]]), [2]))
    assert isinstance(found, StateVerdicts)
    head = len(to_bytes(found)) - 4 - 24 - 8  # the draft token, the arrays, width and type
    content = bytearray(to_bytes(found))
    at, value = ((head, 0), (head + 4, 3), (head + 8 + 4, 0))[place]
    content[at : at + 4] = value.to_bytes(4, "little")
    with pytest.raises(ConnectionError, match="hidden states"):
        take_verdicts(content)


@pytest.mark.parametrize("count", [0, LINK_COMMANDS.most + 1])
def test_an_impossible_number_of_verdicts_is_no_message(count: int) -> None:
    with pytest.raises(ConnectionError, match=f"{count} is no number"):
        take_verdicts(bytearray(count.to_bytes(4, "little") + bytes(64)))


def send(ends: Ends, batched: AnswerBatch[Any]) -> AnswerBatch[Any]:
    (left,) = ends.receiver.send(LINK, EventBatch((), None, (), (batched,))).batched
    return left


def check_unsaid(ends: Ends, batched: AnswerBatch[Any]) -> None:
    """Scores of which the draft reads no verdict between two that are sent around them."""
    channel, said = only_channel(ends.receiver), verdicts_on(scores([[9]], [[]]))
    assert said is not None
    eventually(lambda: channel.send(to_bytes(said)))  # once the target's end serves it
    assert send(ends, batched).channel == 0
    assert channel.send(to_bytes(said))
    assert [as_rows(ends.verdicts.get(timeout=DEADLINE_S)) for _ in range(2)] == [as_rows(said)] * 2


def test_verdicts_reach_the_draft_and_scores_name_no_channel_any_more(ends: Ends) -> None:
    ends.open()
    sent = scores([[1, 2, 3]], [[1, 2]])
    eventually(lambda: (send(ends, sent), not ends.verdicts.empty())[1])  # once the target's end serves it
    left = send(ends, sent)
    assert left.channel == 0 and left.draft_token_ids is sent.draft_token_ids
    assert as_rows(ends.verdicts.get(timeout=DEADLINE_S)) == [(7, 30, 20, 2, 2, 3)]


def test_a_draft_that_wants_none_gets_none(ends: Ends) -> None:
    ends.tell_target(RequestChannel(1))
    offer = ends.from_target.get(timeout=DEADLINE_S)
    assert isinstance(offer, OfferChannel)
    ends.tell_draft(offer)
    assert ends.from_draft.get(timeout=DEADLINE_S).is_open
    check_unsaid(ends, scores([[1, 2]], [[1]]))


@pytest.mark.parametrize("channel", [0, 2])
def test_scores_of_no_channel_bring_no_verdict(ends: Ends, channel: int) -> None:
    ends.open()
    check_unsaid(ends, scores([[1, 2]], [[1]], channel=channel))


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_chained_draft_goes_on_from_what_it_has_sent(ends: Ends, *, is_chained: bool) -> None:
    ends.tell_draft(replace(ends.offer(), is_chained=is_chained))
    assert ends.from_draft.get(timeout=DEADLINE_S).is_open
    assert ends.send(proposals([4, 6], [3, 1])).channel == 1
    assert ends.verdicts.empty() is not is_chained
    if is_chained:
        start = ends.verdicts.get()
        assert isinstance(start, ChainStart) and start.channel == 1
        assert as_rows(start.verdicts) == [(7, 5, 20, 3, 1002, UNKNOWN), (8, 7, 20, 1, 1003, UNKNOWN)]


def test_a_chain_starts_before_its_proposals_are_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a verdict could come first, and find no chain."""
    has_started = list[bool]()

    def written(batched: AnswerBatch[Any]) -> bytes:
        has_started.append(not ends.verdicts.empty())
        return proposals_to_bytes(batched)

    monkeypatch.setattr(sending, "to_bytes", written)
    ends.tell_draft(replace(ends.offer(), is_chained=True))
    assert ends.from_draft.get(timeout=DEADLINE_S).is_open
    assert ends.send(proposals([4], [3])).channel == 1
    assert has_started == [True]


def test_a_channel_that_has_ended_brings_none(ends: Ends) -> None:
    ends.open()
    ends.tell_target(CloseChannel(1))
    assert send(ends, scores([[1, 2]], [[1]])).channel == 0
    assert ends.verdicts.empty()


def test_a_draft_that_does_not_read_ends_the_channel_and_holds_up_nothing(ends: Ends) -> None:
    offer = ends.offer()
    from outrider.tensor_plane.control import connect

    connected = connect(offer.offer).detach()
    many = [[1, 2]] * 5000
    sent = scores(many, [[1]] * 5000)
    eventually(lambda: (send(ends, sent), not ends.from_target.empty())[1])
    assert not ends.from_target.get(timeout=DEADLINE_S).is_open
    connected.close()


def test_what_is_no_verdict_is_not_read_on(ends: Ends) -> None:
    ends.open()
    channel = only_channel(ends.receiver)
    eventually(lambda: channel.send(bytes(8)))
    proposals_still_go = ends.sender.readings()[0].value
    assert proposals_still_go == 0 and ends.verdicts.empty()
