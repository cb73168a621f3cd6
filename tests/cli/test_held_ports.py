"""A port that is held: for its server alone, before it starts and while it is away."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc
import grpc.aio
import pytest

from outrider.cli.stack.held_ports import HeldPort, hold_port


async def _closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def test_servers_of_both_kinds_listen_on_a_held_port_again_and_again() -> None:
    with contextlib.closing(HeldPort()) as held:
        for host in ("127.0.0.1", "0.0.0.0"):
            server = await asyncio.start_server(_closed, host, held.number)
            reader, writer = await asyncio.open_connection("127.0.0.1", held.number)
            assert await reader.read() == b""
            writer.close()
            server.close()
            await server.wait_closed()
            called = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            assert called.add_insecure_port(f"{host}:{held.number}") == held.number
            await called.start()
            await called.stop(None)


def test_no_other_socket_gets_a_held_port() -> None:
    held = [HeldPort() for _ in range(200)]
    assert len({port.number for port in held}) == len(held)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", held[0].number))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held[0].number))
    for port in held:
        port.close()


def test_the_ports_of_a_stack_are_held_for_servers_that_start_later() -> None:
    port = hold_port()
    for _ in range(2):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()
