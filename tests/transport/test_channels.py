"""Proposal channels on the wire: round trips of what is said of them, and a sentence for all that is malformed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from outrider import ports
from outrider.batched import AnswerBatch, ExtendBatch, ScoreAhead, ScoreBatch, token_scores
from outrider.errors import InvalidRequestError, ProtocolError
from outrider.limits import LINK_COMMANDS, LINK_DRAFT_TOKEN_IDS, LINK_TOKEN_IDS
from outrider.planes import ID_BYTES, PlaneOffer
from outrider.transport.convert.commands import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    target_commands_from_proto,
    target_commands_to_proto,
)
from outrider.transport.convert.describing import description_from_proto, description_to_proto
from outrider.transport.convert.events import (
    draft_events_from_proto,
    draft_events_to_proto,
    target_events_from_proto,
    target_events_to_proto,
)
from outrider.types import ModelDescription, PeerAddress
from outrider.v1 import link_pb2 as pb
from tests.transport.test_step_answers import drawn, greedy, plain, sampled
from tests.transport.test_step_commands import extend, score

OFFER = ports.OfferChannel(5, PlaneOffer(b"o" * ID_BYTES, b"t" * ID_BYTES, "127.0.0.1", 40123))
REMOTE = dataclasses.replace(OFFER, target=PeerAddress("10.0.0.1:50051", "target.serving"))
STATES = [ports.ChannelState(5, is_open=True), ports.ChannelState(6, is_open=False, reason="it was ended")]


def to_draft(*commands: Any) -> pb.DraftCommands:
    message = draft_commands_to_proto(commands)
    return pb.DraftCommands.FromString(message.SerializeToString())


def to_target(*commands: Any) -> pb.TargetCommands:
    message = target_commands_to_proto(commands)
    return pb.TargetCommands.FromString(message.SerializeToString())


def from_draft(*events: Any, batched: Any = ()) -> pb.DraftEvents:
    message = draft_events_to_proto(ports.EventBatch(events, batched=tuple(batched)))
    return pb.DraftEvents.FromString(message.SerializeToString())


def from_target(*events: Any, batched: Any = ()) -> pb.TargetEvents:
    message = target_events_to_proto(ports.EventBatch(events, batched=tuple(batched)))
    return pb.TargetEvents.FromString(message.SerializeToString())


def same(batched: Any, others: Any) -> None:
    """Comparison of two values by their fields, arrays among them."""
    assert type(batched) is type(others)
    for name in type(batched).__slots__:
        value, other = getattr(batched, name), getattr(others, name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            same(value, other)
        elif isinstance(value, np.ndarray):
            assert (name, value.tolist()) == (name, other.tolist())
        else:
            assert (name, value) == (name, other)


def test_introductions_travel() -> None:
    for command in (
        ports.RequestChannel(5),
        ports.RequestChannel(5, wants_verdicts=True, begins_next=True),
        ports.CloseChannel(5),
    ):
        assert target_commands_from_proto(to_target(command)) == (command,)
    for told in (OFFER, REMOTE, ports.CloseChannel(5)):
        assert draft_commands_from_proto(to_draft(told)) == (told,)
    for event in (OFFER, *STATES):
        assert target_events_from_proto(from_target(event)).events == (event,)
    for state in STATES:
        assert list[Any](draft_events_from_proto(from_draft(state)).events) == [state]


def test_an_introduction_to_the_wrong_side_is_refused() -> None:
    with pytest.raises(ProtocolError, match="RequestChannel is no command to a draft"):
        to_draft(ports.RequestChannel(5))
    with pytest.raises(ProtocolError, match="OfferChannel is no command to a target"):
        to_target(OFFER)
    with pytest.raises(ProtocolError, match="ScoreAhead is no command to a draft"):
        to_draft(ahead())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"offer_id": b"short"}, f"offer_id: must have {ID_BYTES} bytes, not 5"),
        ({"token": b""}, f"token: must have {ID_BYTES} bytes, not 0"),
        ({"port": 0}, "channel_offer: 0 is no port"),
        ({"port": 1 << 16}, "channel_offer: 65536 is no port"),
        ({"target_address": "unix:/tmp/x"}, "target_address 'unix:/tmp/x' is no host:port"),
        ({"target_address": "unix-abstract:80"}, "target_address 'unix-abstract:80' is no host:port"),
    ],
)
def test_a_malformed_offer_is_refused(changed: dict[str, Any], sentence: str) -> None:
    told, offered = to_draft(OFFER), from_target(OFFER)
    for name, value in changed.items():
        setattr(told.commands[0].channel_offer, name, value)
        setattr(offered.events[0].channel_offer, name, value)
    with pytest.raises(ProtocolError, match=sentence):
        draft_commands_from_proto(told)
    with pytest.raises(ProtocolError, match=sentence):
        target_events_from_proto(offered)


def test_a_description_names_the_network_of_its_host() -> None:
    description = ModelDescription("draft", "m", "", 1, 1, 1, channel_host="4f1e/4026531840")
    assert description_from_proto(description_to_proto(description)).channel_host == "4f1e/4026531840"


def ahead(*, plane: int = 0) -> ScoreAhead:
    """Announcement of four sessions, one of which has a long text."""
    commands: list[Any] = [score(index, kept, index % 3) for index, kept in ((1, 20), (2, 300), (3, 5), (9, 0))]
    for command in commands:
        command.hidden_states_from = command.num_kept_tokens if plane else None
        command.plane = plane
    (batched,) = target_commands_from_proto(to_target(*commands))
    batched = dataclasses.replace(batched, draft_token_ids=np.zeros(0, dtype="<u4"))
    return ScoreAhead(batched, 7, np.array([11, 12, 13, (1 << 64) - 1], dtype="<u8"))


@pytest.mark.parametrize("plane", [0, 3])
def test_scores_ahead_travel(plane: int) -> None:
    sent = ahead(plane=plane)
    assert sent.batched.draft_lengths.tolist() == [1, 2, 0, 0]
    message = to_target(sent)
    (found,) = target_commands_from_proto(message)
    same(found, sent)
    assert found.channel_key == sent.channel_key
    same(target_commands_from_proto(message)[0], sent)


@pytest.mark.parametrize(
    ("name", "content"),
    [("draft_token_ids", bytes(12)), ("support_counts", bytes(12)), ("support_token_ids", bytes(4))],
)
def test_scores_ahead_bring_no_proposals(name: str, content: bytes) -> None:
    message = to_target(ahead())
    setattr(message.commands[0].score_ahead.batched, name, content)
    with pytest.raises(ProtocolError, match="draft_token_ids and supports are brought by the proposals"):
        target_commands_from_proto(message)


@pytest.mark.parametrize(
    "name",
    ["sessions", "generations", "num_kept_tokens", "prefix_chains", "hash_tails", "counts", "token_ids",
     "draft_lengths", "hidden_states_from"],
)  # fmt: skip
@pytest.mark.parametrize("change", [-1, 1, -4, 16])
def test_scores_ahead_whose_columns_do_not_fit_each_other_are_refused(name: str, change: int) -> None:
    message = to_target(ahead(plane=3))
    batched = message.commands[0].score_ahead.batched
    content = getattr(batched, name)
    setattr(batched, name, content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(ProtocolError, match="columns: "):
        target_commands_from_proto(message)


@pytest.mark.parametrize("content", [b"", bytes(8), bytes(31), bytes(40)])
def test_scores_ahead_wait_for_one_proposal_each(content: bytes) -> None:
    message = to_target(ahead())
    message.commands[0].score_ahead.proposal_generations = content
    with pytest.raises(ProtocolError, match="proposal_generations"):
        target_commands_from_proto(message)


def test_scores_ahead_have_the_limits_of_scores() -> None:
    long = np.array([1, LINK_DRAFT_TOKEN_IDS.most + 1, 0, 0], dtype="<u4").tobytes()
    huge = np.array([1, 1, 1, (1 << 32) - 1], dtype="<u4").tobytes()
    for changed in ({"draft_lengths": long}, {"draft_lengths": huge}, {"counts": huge}):
        message = to_target(ahead())
        for name, content in changed.items():
            setattr(message.commands[0].score_ahead.batched, name, content)
        with pytest.raises(ProtocolError, match="at most"):
            target_commands_from_proto(message)
    assert LINK_TOKEN_IDS.most < (1 << 32) - 1
    with pytest.raises(ProtocolError, match="at least one row"):
        target_commands_from_proto(pb.TargetCommands(commands=[pb.TargetCommand(score_ahead=pb.ScoreAhead())]))


def test_scores_ahead_of_too_many_sessions_are_refused_before_anything_is_made_of_them() -> None:
    group = pb.StepCommands(sessions=bytes(8 * LINK_COMMANDS.most + 8))
    many = pb.TargetCommands(commands=[pb.TargetCommand(score_ahead=pb.ScoreAhead(batched=group))])
    with pytest.raises(InvalidRequestError, match=f"at most {LINK_COMMANDS.most}"):
        target_commands_from_proto(many)


def test_extends_say_by_which_channel_proposals_go() -> None:
    commands = [extend(index, 300, draft_length=3) for index in range(4)]
    (batched,) = draft_commands_from_proto(to_draft(*commands))
    assert isinstance(batched, ExtendBatch) and batched.channel == 0
    message = to_draft(dataclasses.replace(batched, channel=7))
    (found,) = draft_commands_from_proto(message)
    same(found, dataclasses.replace(batched, channel=7))
    assert list(found.items()) == [dataclasses.replace(command, channel=7) for command in commands]


def test_a_score_that_came_directly_never_says_so_on_the_wire() -> None:
    (batched,) = target_commands_from_proto(to_target(score(1), score(2)))
    assert isinstance(batched, ScoreBatch)
    (found,) = target_commands_from_proto(to_target(dataclasses.replace(batched, channel=1)))
    same(found, batched)


def kept(message: Any) -> AnswerBatch[Any]:
    """The one group of a message."""
    is_draft = isinstance(message, pb.DraftEvents)
    read: Any = draft_events_from_proto if is_draft else target_events_from_proto
    batch = read(message)
    assert not batch.events
    (batched,) = batch.batched
    return batched  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "events", [[ports.Proposal(index, 2, 9, (3, index)) for index in range(4)], [drawn(1, [2, 1]), drawn(2, [3])]]
)
def test_proposals_say_by_which_channel_they_have_gone(events: list[Any]) -> None:
    batched = kept(from_draft(*events))
    assert batched.channel == 0
    message = from_draft(batched=[dataclasses.replace(batched, channel=7)])
    found = kept(message)
    same(found, dataclasses.replace(batched, channel=7))
    assert list(map(plain, found.events(range(len(events))))) == list(map(plain, events))
    assert found.selected(np.array([1])).channel == 0, "a part of them is not what went there"


FORMS: dict[str, Any] = {"greedy": lambda index: greedy(index, index % 4 + 1), "sampled": lambda i: sampled(i, i % 4)}


def echoing(form: str) -> tuple[list[ports.Scores], AnswerBatch[Any]]:
    """Scores that say what they are of, and the same as arrays."""
    events = [FORMS[form](index) for index in range(7)]
    batched = kept(from_target(*events))
    drafts = np.arange(50, 50 + int(batched.counts.sum()) - 7, dtype="<u4")
    bounds = np.cumsum([0, *(batched.counts - 1)]).tolist()
    whole = [
        dataclasses.replace(event, draft_token_ids=tuple(drafts[start:end].tolist()))
        for event, start, end in zip(events, bounds, bounds[1:], strict=False)
    ]
    return whole, dataclasses.replace(batched, draft_token_ids=drafts)


def with_drafts(event: Any) -> Any:
    return plain(event), event.draft_token_ids


@pytest.mark.parametrize("form", FORMS)
def test_scores_say_which_draft_tokens_they_are_of(form: str) -> None:
    events, batched = echoing(form)
    message = from_target(batched=[batched])
    found = kept(message)
    same(found, batched)
    assert found.make is token_scores
    assert [with_drafts(event) for event in found.events(range(7))] == list(map(with_drafts, events))
    chosen = found.selected(np.array([6, 0, 3]))
    assert [with_drafts(event) for event in chosen.events(range(3))] == [with_drafts(events[i]) for i in (6, 0, 3)]
    some = found.events([2, 5])
    assert [with_drafts(event) for event in some] == [with_drafts(events[i]) for i in (2, 5)]


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_a_step_that_was_split_say_it_each(form: str) -> None:
    events, _ = echoing(form)
    message = from_target(*events)
    found = {event.session: with_drafts(event) for event in target_events_from_proto(message).all_events()}
    assert found == {event.session: with_drafts(event) for event in events}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", [-1, 1, -4, 4])
def test_draft_tokens_that_do_not_fit_their_scores_are_refused(form: str, change: int) -> None:
    message = from_target(batched=[echoing(form)[1]])
    content = message.events[0].answers.draft_token_ids
    message.events[0].answers.draft_token_ids = content[:change] if change < 0 else content + bytes(change)
    with pytest.raises(ProtocolError, match="draft_token_ids"):
        target_events_from_proto(message)


def test_draft_tokens_of_scores_without_positions_are_refused() -> None:
    message = from_target(*(greedy(index, 0) for index in range(6)), greedy(6, 2))
    message.events[0].answers.draft_token_ids = bytes(4)
    with pytest.raises(ProtocolError, match="scores have at least one position"):
        target_events_from_proto(message)
