"""Ports found by names: every address is one, and a name counts for what it last stood for while nobody resolves it."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from outrider.errors import ConfigError, UnavailableError
from outrider.process.discovery import RemoteReplicas, resolve_host
from outrider.tls import Tls
from outrider.transport.remote import RemoteTarget
from outrider.transport.security import ClientSecurity
from tests.support.scripted_ports import ToyTarget, random_rows
from tests.transport.conftest import Serve


class Names:
    """A resolver that a test writes."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses[host]


def replicas(addresses: str, names: Names, security: ClientSecurity | None = None) -> RemoteReplicas[RemoteTarget]:
    return RemoteReplicas(
        addresses,
        RemoteTarget,
        security or ClientSecurity(),
        interval_s=1.0,
        setting="target_address",
        resolve=names,
    )


async def test_every_address_of_a_name_is_a_port_and_stays_the_same_one() -> None:
    names = Names(targets=["10.0.0.2", "10.0.0.1"])
    found = replicas("targets:50051", names)
    first = await found.find()
    assert [port.address for port in first.values()] == list(first) == ["10.0.0.1:50051", "10.0.0.2:50051"]
    names.addresses["targets"] = ["10.0.0.3", "10.0.0.2"]
    second = await found.find()
    assert list(second) == ["10.0.0.2:50051", "10.0.0.3:50051"]
    assert second["10.0.0.2:50051"] is first["10.0.0.2:50051"]


async def test_lists_of_addresses_names_and_socket_files() -> None:
    names = Names(a=["fd00::1"], b=["10.0.0.1"])
    found = replicas("a:1, 10.0.0.9:2,[::1]:3,localhost:4,unix:/run/t.sock,b:5,a:1", names)
    assert set(await found.find()) == {
        "[fd00::1]:1", "10.0.0.9:2", "[::1]:3", "localhost:4", "unix:/run/t.sock", "10.0.0.1:5",
    }  # fmt: skip
    assert sorted(names.asked) == ["a", "b"]


async def test_while_a_name_cannot_be_resolved_what_it_last_stood_for_counts(caplog: pytest.LogCaptureFixture) -> None:
    names = Names(targets=["10.0.0.1"])
    found = replicas("targets:1,10.0.0.9:1", names)
    await found.find()
    del names.addresses["targets"]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert set(await found.find()) == {"10.0.0.1:1", "10.0.0.9:1"}
    assert caplog.text.count("targets cannot be resolved: Name or service not known") == 1


async def test_a_name_nobody_ever_knew_is_told() -> None:
    with pytest.raises(UnavailableError, match="nowhere cannot be resolved: Name or service not known"):
        await replicas("nowhere:1", Names()).find()


@pytest.mark.parametrize("addresses", ["", "a:1,", "a:1,,b:2"])
def test_a_list_with_a_gap_is_refused(addresses: str) -> None:
    with pytest.raises(ConfigError, match="target_address: should be addresses separated by commas"):
        replicas(addresses, Names())


@pytest.mark.parametrize("addresses", ["a", "a:1,b", "a:70000", "a:1 b:2 c"])
def test_an_address_that_is_none_names_the_setting(addresses: str) -> None:
    with pytest.raises(ConfigError, match="target_address: should be host:port with a port from 1 to 65535"):
        replicas(addresses, Names())


def test_a_token_without_tls_is_refused_before_anything_is_looked_up() -> None:
    security = ClientSecurity(token=lambda: "t", token_setting="link_token_file")
    with pytest.raises(ConfigError, match="link_token_file: would go to targets:1 unencrypted"):
        replicas("targets:1", Names(), security)


async def test_certificates_bear_the_name_and_not_the_address_behind_it() -> None:
    names = Names(targets=["10.0.0.1"])
    for given, expected in ((None, "targets"), ("other.example", "other.example")):
        security = ClientSecurity(tls=Tls(ca_file="/ca", server_name=given))
        assert await certificate("targets:1", names, security) == Tls(ca_file="/ca", server_name=expected)
    assert await certificate("10.0.0.1:1", names, ClientSecurity(tls=Tls(ca_file="/ca"))) == Tls(ca_file="/ca")


async def certificate(addresses: str, names: Names, security: ClientSecurity) -> Tls | None:
    """TLS with which the only address is connected."""
    found: RemoteReplicas[Any] = RemoteReplicas(
        addresses, lambda _, own: own.tls, security, interval_s=1.0, setting="target_address", resolve=names
    )
    tls: Tls | None
    (tls,) = (await found.find()).values()
    return tls


async def test_the_systems_resolver_gives_addresses_of_one_family() -> None:
    found = await resolve_host("localhost")
    assert found in (["127.0.0.1"], ["::1"])


async def test_what_is_found_can_be_talked_to(serve: Serve) -> None:
    """Resolution with this machine's own resolver, a name, and two addresses on a list."""
    servers = [await serve("target", ToyTarget(random_rows(5), 5)) for _ in range(2)]
    ports = [server.address.rpartition(":")[2] for server in servers]
    found = RemoteReplicas(
        f"localhost:{ports[0]}, 127.0.0.1:{ports[1]}", RemoteTarget, ClientSecurity(), interval_s=1.0
    )
    described = [await port.describe() for port in (await found.find()).values()]
    assert [description.model_name for description in described] == ["toy-target"] * 2
