"""Addresses: hosts and ports taken apart and joined, and sockets that listen on every spelling of them."""

from __future__ import annotations

import socket

import pytest

from outrider.addresses import (
    bare_host,
    check_listening,
    form_problem,
    host_problem,
    join_address,
    listening_socket,
    reachable_host,
    split_address,
)
from outrider.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "address", "bare"),
    [
        ("::", "[::]:5", "::"),
        ("[::]", "[::]:5", "::"),
        ("::1", "[::1]:5", "::1"),
        ("[::1]", "[::1]:5", "::1"),
        ("fe80::1%eth0", "[fe80::1%eth0]:5", "fe80::1%eth0"),
        ("0:0:0:0:0:0:0:0", "[::]:5", "::"),
        ("[0:0::1]", "[::1]:5", "::1"),
        ("::ffff:127.0.0.1", "127.0.0.1:5", "127.0.0.1"),
        ("[::ffff:0.0.0.0]", "0.0.0.0:5", "0.0.0.0"),
        ("127.0.0.1", "127.0.0.1:5", "127.0.0.1"),
        ("localhost", "localhost:5", "localhost"),
    ],
)
def test_a_host_and_a_port_are_joined_and_taken_apart(host: str, address: str, bare: str) -> None:
    assert join_address(host, 5) == address
    assert split_address(address) == (bare, "5")
    assert bare_host(host) == bare
    assert (host_problem(bare), form_problem(address)) == ("", "")


def test_a_socket_file_is_the_whole_address() -> None:
    assert join_address("unix:/run/a.sock", 5) == "unix:/run/a.sock"
    assert (host_problem("unix:/run/a:b.sock"), form_problem("unix:/run/a:b.sock")) == ("", "")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("::1:50050", "should have an IPv6 address in brackets, as in [::1]:50050"),
        (":::50050", "should have an IPv6 address in brackets, as in [::]:50050"),
        ("::1", "should have an IPv6 address in brackets"),
        ("[::1]", "should be host:port"),
        ("[localhost]:5", ""),
        ("[::g]:5", "should be host:port with a valid host"),
        ("a:b:5", "should have an IPv6 address in brackets"),
    ],
)
def test_an_address_of_another_form_is_told_what_it_should_be(address: str, problem: str) -> None:
    assert problem in form_problem(address)


@pytest.mark.parametrize("host", ["localhost:8000", "1.2.3.4:5", "[::1]:5", "[::1", "::g", "a]"])
def test_what_is_no_host_is_refused(host: str) -> None:
    assert host_problem(host).startswith("should be a host")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("::", "::1"), ("[::]", "::1"), ("0.0.0.0", "127.0.0.1"), ("[::1]", "::1"), ("10.0.0.1", "10.0.0.1")],
)
def test_a_server_on_every_interface_is_reached_by_loopback(host: str, expected: str) -> None:
    assert reachable_host(host) == expected


def _has_ipv6() -> bool:
    try:
        listening_socket("::1", 0).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6")


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "callers"),
    [
        ("::", ["::1", "127.0.0.1"]),
        ("[::]", ["::1", "127.0.0.1"]),
        ("::1", ["::1"]),
        ("0:0:0:0:0:0:0:0", ["::1", "127.0.0.1"]),
        ("::ffff:127.0.0.1", ["127.0.0.1"]),
        ("[::1]", ["::1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_every_spelling_of_a_host_can_be_listened_on(host: str, callers: list[str]) -> None:
    with listening_socket(host, 0) as listener:
        port = listener.getsockname()[1]
        for caller in callers:
            socket.create_connection((caller, port), timeout=5).close()
        with pytest.raises(ConfigError, match=r"is in use"):
            check_listening(host, port, port_setting="port", host_setting="host")
    check_listening(host, 0, port_setting="port", host_setting="host")
