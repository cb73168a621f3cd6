"""Channel introductions: which drafts and targets are brought together, and when a channel is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.config.fields import DraftAhead
from outrider.planes import ID_BYTES, PlaneOffer
from outrider.ports import ChannelState, CloseChannel, OfferChannel, RequestChannel
from outrider.types import ModelDescription, PeerAddress
from outrider_coordinator.routing import introductions
from outrider_coordinator.routing.channel_introductions import ChannelIntroductions
from tests.coordinator.routing.fleet import eventually

OFFER = PlaneOffer(b"o" * ID_BYTES, b"t" * ID_BYTES, "127.0.0.1", 40123)


class Attached:
    """A replica, its connection, and what was sent there."""

    def __init__(self, host: str = "here", *, role: str = "target", device: str = "") -> None:
        self.name = f"{role}:1"
        self.description: ModelDescription | None = ModelDescription(
            role, "m", "", 1, 1, 1, channel_host=host, device_id=device
        )
        self.sent: list[Any] = []

    @property
    def connection(self) -> Attached:
        return self

    def send_alone(self, command: Any) -> None:
        self.sent.append(command)


def attached(host: str = "here", *, role: str = "target", device: str = "") -> Any:
    """Service attached as a replica."""
    return Attached(host, role=role, device=device)


class Pair:
    """One target and one draft, attached."""

    def __init__(self, target_host: str = "here", draft_host: str = "here", *, is_enabled: bool = True) -> None:
        self.channels: Any = ChannelIntroductions(is_enabled=is_enabled)
        self.target = attached(target_host)
        self.draft = attached(draft_host, role="draft")
        self.channels.introduce(self.target, self.draft)

    @property
    def channel(self) -> int:
        number: int = self.channels.channel(self.target, self.draft)
        return number

    def open(self) -> int:
        """The number of the connection, which the draft now says is open."""
        number: int = self.target.sent[-1].connection
        self.channels.on_event(self.draft, ChannelState(number, is_open=True))
        return number


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.channels.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "RETRY_S", 0.001)
    monkeypatch.setattr("outrider_coordinator.routing.channel_introductions.RETRY_S", 0.001)


def test_a_target_is_asked_for_an_offer_to_a_draft_of_its_host(pair: Pair) -> None:
    assert (pair.target.sent, pair.draft.sent) == ([RequestChannel(1, wants_verdicts=True)], [])
    other: Any = Attached()
    pair.channels.introduce(other, pair.draft)
    assert (other.sent, pair.draft.sent) == ([RequestChannel(2, wants_verdicts=True)], [])


@pytest.mark.parametrize(
    "others", [Pair("here", "there"), Pair("", ""), Pair("here", ""), Pair("", "here"), Pair(is_enabled=False)]
)
def test_no_others_are_introduced(others: Pair) -> None:
    assert not others.target.sent and not others.draft.sent
    assert others.channel == 0


def test_between_hosts_an_offer_names_the_targets_address() -> None:
    address = PeerAddress("10.0.0.1:50051", "target.serving")
    channels: Any = ChannelIntroductions(is_enabled=True, between_hosts=True)
    target, on_a_socket = attached("here"), attached("elsewhere")
    target.description = replace(target.description, peer_address=address)
    near, far, older = (attached(host, role="draft") for host in ("here", "there", ""))
    for draft in (near, far, older):
        for each in (target, on_a_socket):
            channels.introduce(each, draft)
    assert [command.connection for command in target.sent] == [1, 2]
    assert not on_a_socket.sent
    for number in (1, 2):
        channels.on_event(target, OfferChannel(number, OFFER))
    assert near.sent == [OfferChannel(1, OFFER)]
    assert far.sent == [OfferChannel(2, OFFER, target=address)]
    assert not older.sent


@pytest.mark.parametrize(("address", "is_told"), [("127.0.0.1:50051", True), ("10.0.0.1:50051", False)])
def test_an_address_that_only_this_host_reaches_is_told(
    address: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    channels: Any = ChannelIntroductions(is_enabled=True, between_hosts=True)
    target = attached("here")
    target.description = replace(target.description, peer_address=PeerAddress(address))
    channels.introduce(target, attached("here", role="draft"))
    assert not caplog.messages
    channels.introduce(target, attached("there", role="draft"))
    assert [address in told and "target_address" in told for told in caplog.messages] == [True] * is_told


def test_an_offer_goes_on_to_the_draft_as_it_is(pair: Pair) -> None:
    pair.channels.on_event(pair.target, OfferChannel(1, OFFER))
    assert pair.draft.sent == [OfferChannel(1, OFFER)]
    assert pair.channel == 0


@pytest.mark.parametrize(
    ("draft_ahead", "draft_device", "wants_verdicts", "is_chained"),
    [
        (DraftAhead.IN_TURN, "gpu-2", False, False),
        (DraftAhead.VERDICT, "gpu-2", True, False),
        (DraftAhead.CHAIN, "gpu-2", True, True),
        (DraftAhead.CHAIN, "gpu-1", True, False),  # a draft that goes on would take the target's time
    ],
)
def test_what_goes_ahead_is_said_to_both_sides(
    draft_ahead: DraftAhead, draft_device: str, wants_verdicts: bool, is_chained: bool
) -> None:
    channels: Any = ChannelIntroductions(is_enabled=True, draft_ahead=draft_ahead)
    target, draft = attached(device="gpu-1"), attached(role="draft", device=draft_device)
    channels.introduce(target, draft)
    channels.on_event(target, OfferChannel(1, OFFER))
    assert target.sent == [RequestChannel(1, wants_verdicts=wants_verdicts, begins_next=is_chained)]
    assert draft.sent == [OfferChannel(1, OFFER, is_chained=is_chained)]


def test_another_order_is_taken_by_another_channel() -> None:
    channels: Any = ChannelIntroductions(is_enabled=True, draft_ahead=DraftAhead.AUTO)
    target, draft, near = (
        attached(device="gpu-1"),
        attached(role="draft", device="gpu-2"),
        attached(role="draft", device="gpu-1"),
    )
    for each in (draft, near):
        channels.introduce(target, each)
    for number in (1, 2):
        channels.on_event(target, OfferChannel(number, OFFER))
    for each, number in ((draft, 1), (near, 2)):
        channels.on_event(each, ChannelState(number, is_open=True))
    target.sent.clear()
    draft.sent.clear()
    for number, is_ahead in ((3, True), (4, False)):
        channels.take_order(target, is_ahead)
        assert (channels.channel(target, draft), channels.channel(target, near)) == (0, 2)
        last = 1 if is_ahead else 3
        assert target.sent == [CloseChannel(last), RequestChannel(number, wants_verdicts=True, begins_next=is_ahead)]
        channels.on_event(target, OfferChannel(number, OFFER))
        assert draft.sent == [CloseChannel(last), OfferChannel(number, OFFER, is_chained=is_ahead)]
        channels.on_event(draft, ChannelState(number, is_open=True))
        assert (channels.channel(target, draft), channels.num_ahead) == (number, is_ahead)
        channels.take_order(target, is_ahead)
        assert channels.channel(target, draft) == number, "it is taken once"
        target.sent.clear()
        draft.sent.clear()
    channels.take_order(target, True)
    channels.lost(target)
    target.sent.clear()
    for each in (draft, near):
        channels.introduce(target, each)
    assert target.sent == [RequestChannel(number, wants_verdicts=True) for number in (6, 7)]


def test_a_draft_that_comes_after_a_change_of_the_order_takes_part_in_it() -> None:
    channels: Any = ChannelIntroductions(is_enabled=True, draft_ahead=DraftAhead.AUTO)
    target, draft = attached(device="gpu-1"), attached(role="draft", device="gpu-2")
    for is_ahead in (True, False):
        channels.take_order(target, is_ahead)
        channels.introduce(target, draft)
        assert target.sent[-1].begins_next == is_ahead
        channels.lost(draft)


def test_a_channel_is_used_while_it_is_said_to_be_open(pair: Pair) -> None:
    pair.channels.on_event(pair.target, OfferChannel(1, OFFER))
    assert (pair.channel, pair.channels.num_open) == (0, 0)
    assert (pair.open(), pair.channel, pair.channels.num_open) == (1, 1, 1)
    other: Any = Attached()
    pair.channels.introduce(other, pair.draft)
    for target, draft in ((other, pair.draft), (pair.target, None), (None, pair.draft)):
        assert pair.channels.channel(target, draft) == 0


@pytest.mark.parametrize("side", ["target", "draft"])
async def test_a_channel_that_has_ended_is_not_used(pair: Pair, side: str) -> None:
    pair.open()
    pair.channels.on_event(getattr(pair, side), ChannelState(1, is_open=False, reason="it was ended"))
    assert (pair.channel, pair.channels.num_open) == (0, 0)
    assert pair.target.sent[-1] == pair.draft.sent[-1] == CloseChannel(1), "both let go of it"


async def test_a_pair_is_introduced_again_after_its_channel_has_ended(soon: None) -> None:
    pair = Pair()
    for number in (1, 2, 3):
        assert pair.open() == pair.channel == number
        pair.channels.on_event(pair.draft, ChannelState(number, is_open=False))
        await eventually(lambda: bool(pair.target.sent[-1] == RequestChannel(number + 1, wants_verdicts=True)))  # noqa: B023 - awaited here
        assert pair.channel == 0
    pair.channels.close()


async def test_a_pair_in_vain_is_tried_less_and_less_often(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def call_later(wait_s: float, again: Any, *arguments: Any) -> Any:
        waits.append(wait_s)
        again(*arguments)

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    for number in range(1, 9):
        pair.channels.on_event(pair.target, ChannelState(number, is_open=False))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    waits.clear()
    number = pair.open()
    pair.channels.on_event(pair.target, ChannelState(number, is_open=False))
    assert waits == [1], "it was open in between"
    monkeypatch.undo()


@pytest.mark.parametrize(("lost", "left"), [("target", "draft"), ("draft", "target")])
def test_a_lost_replica_ends_its_channels_on_the_other_side(pair: Pair, lost: str, left: str) -> None:
    pair.open()
    pair.channels.lost(getattr(pair, lost))
    assert getattr(pair, left).sent[-1] == CloseChannel(1)
    assert (pair.channel, pair.channels.num_open) == (0, 0)
    pair.channels.on_event(getattr(pair, left), ChannelState(1, is_open=True))
    assert pair.channel == 0, "there is no such connection any more"
    again: Any = Attached(role=lost)
    asked: Any = again if lost == "target" else pair.target
    pair.channels.introduce(asked, pair.draft if lost == "target" else again)
    assert asked.sent[-1] == RequestChannel(2, wants_verdicts=True)


async def test_a_pair_is_not_tried_again_once_one_of_them_is_lost(soon: None) -> None:
    pair = Pair()
    pair.channels.on_event(pair.draft, ChannelState(1, is_open=False))
    pair.channels.lost(pair.draft)
    num_sent = len(pair.target.sent)
    await asyncio.sleep(0.02)
    assert len(pair.target.sent) == num_sent


def test_events_of_strangers_are_ignored(pair: Pair) -> None:
    strangers: list[Any] = [Attached(), Attached("there", role="draft")]
    for stranger in strangers:
        pair.channels.on_event(stranger, OfferChannel(1, OFFER))
        pair.channels.on_event(stranger, ChannelState(1, is_open=True))
    pair.channels.on_event(pair.draft, OfferChannel(1, OFFER))  # a draft offers nothing
    assert (pair.channel, pair.draft.sent) == (0, [])
    pair.open()
    pair.channels.on_event(strangers[0], ChannelState(1, is_open=False))
    assert pair.channel == 1


async def test_events_of_old_connections_are_ignored(soon: None) -> None:
    pair = Pair()
    pair.channels.on_event(pair.target, ChannelState(1, is_open=False))
    pair.channels.on_event(pair.draft, ChannelState(0, is_open=True))  # of none
    assert pair.channel == 0
    await eventually(lambda: pair.target.sent[-1] == RequestChannel(2, wants_verdicts=True))
    pair.channels.on_event(pair.target, OfferChannel(1, OFFER))
    pair.channels.on_event(pair.draft, ChannelState(1, is_open=True))
    assert (pair.channel, pair.draft.sent) == (0, [CloseChannel(1)])
    assert pair.open() == pair.channel == 2
    pair.channels.on_event(pair.draft, ChannelState(1, is_open=False))
    assert pair.channel == 2
    pair.channels.close()
