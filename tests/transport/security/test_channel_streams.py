"""Proposal channels between hosts: the security of a link, and what ends them."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.config import DraftSettings
from outrider.errors import ConfigError, LoadingError
from outrider.ports import ChannelState, OfferChannel, RequestChannel
from outrider.proposal_channel.receiver import ProposalReceiver
from outrider.proposal_channel.sender import ProposalSender
from outrider.transport import channel_streams
from outrider.transport.channel_streams import MAX_PIECE_BYTES, call_target
from outrider.transport.channels import keepalive
from outrider.transport.security import ClientSecurity, ServerSecurity, ServerTls, TokenFile, link_security
from outrider.transport.server import Server
from outrider.types import PeerAddress
from tests.support.tcp_proxy import TcpProxy
from tests.transport.security.authorities import Authority
from tests.transport.security.conftest import ServeWith

DEADLINE_S = 240.0
NAME = "target.example"


class Accepted:
    """Sockets that a target was given."""

    def __init__(self) -> None:
        self._given = queue.Queue[socket.socket]()

    def admit(self, connected: socket.socket) -> None:
        connected.settimeout(DEADLINE_S)
        self._given.put(connected)

    def socket(self) -> socket.socket:
        return self._given.get(timeout=DEADLINE_S)


def receive(connected: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (part := connected.recv(size - len(found))):
        found += part
    return found


async def ends(connected: socket.socket) -> bool:
    connected.settimeout(DEADLINE_S)
    try:
        return await asyncio.to_thread(connected.recv, 1) == b""
    except ConnectionResetError:  # the other end was closed before all was read
        return True


async def secured(serve_with: ServeWith, authority: Authority, tmp_path: Path, accepted: Accepted) -> Server:
    (tmp_path / "tokens").write_text("the-token\n")
    tokens = TokenFile("link_token_file", str(tmp_path / "tokens"))
    tls = ServerTls(**authority.issue(NAME), client_ca_file=authority.ca_file)
    return await serve_with(ServerSecurity(tls, tokens), role="target", admit_channel=accepted.admit)


def settings_of(authority: Authority, tmp_path: Path, **more: Any) -> DraftSettings:
    """A draft's settings: the certificate that it shows coordinators is shown to targets."""
    (tmp_path / "draft.tokens").write_text("the-token\n")
    own = {f"tls_{name}": path for name, path in authority.issue("draft.example", file="draft").items()}
    trusted = {"link_tls_ca_file": authority.ca_file, "link_token_file": str(tmp_path / "draft.tokens")}
    return DraftSettings.model_validate({"method": "ngram", **own, **trusted, **more})


async def test_mutual_tls_and_a_token_carry_bytes_both_ways(
    serve_with: ServeWith, authority: Authority, tmp_path: Path
) -> None:
    accepted = Accepted()
    server = await secured(serve_with, authority, tmp_path, accepted)
    ours = call_target(link_security(settings_of(authority, tmp_path)), PeerAddress(server.address, NAME))
    theirs = await asyncio.to_thread(accepted.socket)
    content = bytes(range(256)) * (MAX_PIECE_BYTES // 100)
    for one, other in ((ours, theirs), (theirs, ours)):
        sending = asyncio.to_thread(one.sendall, content)
        received, _ = await asyncio.gather(asyncio.to_thread(receive, other, len(content)), sending)
        assert received == content
    ours.close()
    assert await ends(theirs)
    theirs.close()


async def test_a_target_that_closes_its_end_ends_the_drafts(serve_with: ServeWith) -> None:
    accepted = Accepted()
    server = await serve_with(ServerSecurity(), role="target", admit_channel=accepted.admit)
    ours = call_target(ClientSecurity(), PeerAddress(server.address))
    (await asyncio.to_thread(accepted.socket)).close()
    assert await ends(ours)
    ours.close()


async def test_a_target_that_closes_without_reading_all_has_not_failed(
    serve_with: ServeWith, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    accepted = Accepted()
    server = await serve_with(ServerSecurity(), role="target", admit_channel=accepted.admit)
    ours = call_target(ClientSecurity(), PeerAddress(server.address))
    theirs = await asyncio.to_thread(accepted.socket)
    ours.sendall(bytes(MAX_PIECE_BYTES))
    assert await asyncio.to_thread(theirs.recv, 1)
    theirs.close()
    assert await ends(ours)
    assert "failed" not in caplog.text and "internal error" not in caplog.text
    ours.close()


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"link_token_file": "other"}, NAME, "token"),
        ({"link_token_file": None}, NAME, "token"),
        ({"tls_cert_file": None, "tls_key_file": None}, NAME, "certificate"),
        ({}, "other.example", "other.example"),
    ],
    ids=["another token", "no token", "no certificate", "another name"],
)
async def test_what_is_refused_ends_and_says_why(
    change: dict[str, Any],
    name: str,
    said: str,
    serve_with: ServeWith,
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    if change.get("link_token_file"):
        other = tmp_path / "other"
        other.write_text("another-token\n")
        change = {"link_token_file": str(other)}
    server = await secured(serve_with, authority, tmp_path, Accepted())
    ours = call_target(link_security(settings_of(authority, tmp_path, **change)), PeerAddress(server.address, name))
    assert await ends(ours)
    assert said in caplog.text
    ours.close()


def test_a_token_does_not_leave_the_host_in_plain_text(authority: Authority, tmp_path: Path) -> None:
    settings = settings_of(authority, tmp_path, link_tls_ca_file=None)
    with pytest.raises(ConfigError, match=r"link_token_file: would go to 10\.0\.0\.1:50051 unencrypted"):
        call_target(link_security(settings), PeerAddress("10.0.0.1:50051"))


async def test_a_target_that_loads_refuses(serve_with: ServeWith, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def admit(_: socket.socket) -> None:
        raise LoadingError("the model is still being loaded")

    server = await serve_with(ServerSecurity(), role="target", admit_channel=admit)
    ours = call_target(ClientSecurity(), PeerAddress(server.address))
    assert await ends(ours)
    assert "still being loaded" in caplog.text
    ours.close()


async def test_what_is_not_read_is_held_back(serve_with: ServeWith) -> None:
    accepted = Accepted()
    server = await serve_with(ServerSecurity(), role="target", admit_channel=accepted.admit)
    ours = call_target(ClientSecurity(), PeerAddress(server.address))
    theirs = await asyncio.to_thread(accepted.socket)
    ours.settimeout(0.5)
    with pytest.raises(TimeoutError):  # long before this number of bytes
        await asyncio.to_thread(ours.sendall, bytes(64 << 20))
    theirs.close()
    assert await ends(ours)
    ours.close()


class Channel:
    """Both ends of one channel between hosts."""

    def __init__(self, call: Callable[[PeerAddress], socket.socket]) -> None:
        self.receiver, self.sender = ProposalReceiver(), ProposalSender(call)
        self.from_target, self.from_draft = queue.Queue[Any](), queue.Queue[Any]()

    async def offer(self, address: str, **changes: Any) -> Any:
        """Answer of the draft to an offer that is brought to it."""
        self.receiver.handle(1, RequestChannel(1), self.from_target.put, self.from_target.put)
        offered = self.from_target.get(timeout=DEADLINE_S)
        brought = OfferChannel(1, offered.offer, target=PeerAddress(address), **changes)
        self.sender.handle(2, brought, self.from_draft.put, self.from_draft.put)
        return await asyncio.to_thread(self.from_draft.get, timeout=DEADLINE_S)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


async def test_a_path_that_swallows_everything_ends_the_channel(
    serve_with: ServeWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_streams, "PATH_KEEPALIVE", keepalive(200, 2_000))
    channel = Channel(partial(call_target, ClientSecurity()))
    server = await serve_with(ServerSecurity(), role="target", admit_channel=channel.receiver.admit)
    async with TcpProxy(int(server.address.rpartition(":")[2])).running() as proxy:
        assert await channel.offer(proxy.address) == ChannelState(1, is_open=True)
        await proxy.black_hole()
        said = await asyncio.to_thread(channel.from_draft.get, timeout=DEADLINE_S)
        assert isinstance(said, ChannelState) and not said.is_open
        await asyncio.to_thread(channel.close)


async def test_a_stranger_with_a_stream_and_no_offer_is_turned_away(serve_with: ServeWith) -> None:
    channel = Channel(partial(call_target, ClientSecurity()))
    server = await serve_with(ServerSecurity(), role="target", admit_channel=channel.receiver.admit)
    assert await channel.offer(server.address) == ChannelState(1, is_open=True)
    ours = call_target(ClientSecurity(), PeerAddress(server.address))
    ours.settimeout(DEADLINE_S)
    nonce = await asyncio.to_thread(receive, ours, 16)
    assert len(nonce) == 16
    ours.sendall(bytes(64))
    assert await ends(ours)
    ours.close()
    await asyncio.to_thread(channel.close)


async def test_a_draft_without_a_way_to_other_hosts_says_so() -> None:
    channel = Channel(None)  # type: ignore[arg-type]
    said = await channel.offer("10.0.0.1:50051")
    assert said == ChannelState(1, is_open=False, reason="this draft has no channels to other hosts")
    channel.close()


async def test_a_draft_that_has_no_descriptors_left_says_so() -> None:
    def call(_: PeerAddress) -> socket.socket:
        raise OSError("too many open files")

    channel = Channel(call)
    assert await channel.offer("10.0.0.1:50051") == ChannelState(1, is_open=False, reason="too many open files")
    channel.close()
