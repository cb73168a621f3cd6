"""Access to a plane: the holder of an offer, once; strangers neither get in nor delay others."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import boot_id
from outrider.boot_id import channel_host
from outrider.errors import UnavailableError
from outrider.planes import ID_BYTES, PlaneOffer
from outrider.tensor_plane.control import ControlConnection, ControlListener, Message, connect
from outrider.tensor_plane.endpoints import PeerFacts


@pytest.fixture
def listener() -> Iterator[ControlListener]:
    found = ControlListener("127.0.0.1")
    yield found
    found.close()


def expected(listener: ControlListener) -> tuple[PlaneOffer, queue.Queue[ControlConnection]]:
    offer = PlaneOffer.new(listener.host, listener.port)
    connected: queue.Queue[ControlConnection] = queue.Queue()
    listener.expect(offer, connected.put)
    return offer, connected


def received(connection: ControlConnection, count: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += connection.receive(10)
    return found


def test_messages_go_both_ways_whole_and_in_order(listener: ControlListener) -> None:
    offer, connected = expected(listener)
    reader, writer = connect(offer), connected.get(timeout=240)
    sent = [{"type": "put", "number": number, "text": "x" * (number * 5000)} for number in range(30)]
    for message in sent:
        writer.send(message)
    assert received(reader, len(sent)) == sent
    reader.send({"type": "done"})
    assert received(writer, 1) == [{"type": "done"}]
    assert writer.receive(0) == []
    reader.close()
    with pytest.raises(OSError):
        received(writer, 1)
    writer.close()


def test_an_offer_is_good_once(listener: ControlListener) -> None:
    offer, connected = expected(listener)
    connect(offer).close()
    connected.get(timeout=240).close()
    with pytest.raises(UnavailableError, match="not the writer"):
        connect(offer)


def test_a_wrong_token_leaves_the_offer_to_its_holder(listener: ControlListener) -> None:
    offer, connected = expected(listener)
    with pytest.raises(UnavailableError, match="not the writer"):
        connect(replace(offer, token=bytes(ID_BYTES)))
    with pytest.raises(UnavailableError, match="not the writer"):
        connect(replace(offer, offer_id=bytes(ID_BYTES)))
    connect(offer).close()
    connected.get(timeout=240).close()


def test_a_writer_that_does_not_know_the_token_is_not_trusted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        offer = PlaneOffer.new("127.0.0.1", server.getsockname()[1])

        def pretend(connected: socket.socket) -> None:
            connected.sendall(bytes(16))
            connected.recv(100)
            connected.sendall(bytes(32))

        import threading

        threading.Thread(target=lambda: pretend(server.accept()[0]), daemon=True).start()
        with pytest.raises(UnavailableError, match="does not know its own offer"):
            connect(offer)


def test_strangers_who_say_nothing_hold_nobody_up(listener: ControlListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.tensor_plane.control.HANDSHAKE_S", 600.0)
    silent = [socket.create_connection((listener.host, listener.port)) for _ in range(20)]
    offer, connected = expected(listener)
    connect(offer).close()
    connected.get(timeout=240).close()
    for stranger in silent:
        stranger.close()


def test_many_strangers_are_one_warning(listener: ControlListener, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        ours, theirs = socket.socketpair()
        ours.sendall(bytes(64))
        listener.greet(theirs)
        ours.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a connection to the tensor plane was refused" in caplog.text


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x03abc"])
def test_what_is_no_message_ends_the_connection(content: bytes) -> None:
    ours, theirs = socket.socketpair()
    connection = ControlConnection(ours)
    theirs.sendall(content)
    with pytest.raises(ConnectionError):
        connection.receive(5)
    theirs.close()
    connection.close()


def test_an_offer_that_nobody_serves_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        offer = PlaneOffer.new("127.0.0.1", server.getsockname()[1])
    with pytest.raises(UnavailableError, match="cannot be reached"):
        connect(offer)


def test_ids_and_tokens_are_not_repeated_and_not_shown() -> None:
    offers = [PlaneOffer.new("127.0.0.1", 1) for _ in range(100)]
    assert len({offer.offer_id for offer in offers} | {offer.token for offer in offers}) == 200
    assert offers[0].token.hex() not in repr(offers[0])
    assert repr(offers[0].token) not in repr(offers[0])


_SAY = "from outrider.boot_id import boot_id; import sys; print(boot_id(), 'torch' in sys.modules)"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have none")
def test_processes_of_a_host_read_the_same_without_torch() -> None:
    said = subprocess.run([sys.executable, "-c", _SAY], capture_output=True, text=True, check=True).stdout
    assert said.split() == [boot_id.boot_id(), "False"]


def test_without_one_a_plane_goes_by_the_hosts_name_and_a_channel_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(boot_id, "PATH", tmp_path / "missing")
    assert boot_id.boot_id() == channel_host() == ""
    assert PeerFacts.of(torch.device("cpu")).host_id == socket.gethostname()
