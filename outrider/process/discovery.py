"""Discovery of replicas: every address that a name resolves to is one replica.

A comma-separated list may contain names and addresses. A name that cannot be resolved keeps its last addresses. The
function that makes a port from an address is a parameter.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.addresses import check_address, join_address, split_address
from outrider.errors import ConfigError, UnavailableError
from outrider.transport.security import OPEN_CLIENT, ClientSecurity

_log = logging.getLogger(__name__)

PortT = TypeVar("PortT")
Resolve = Callable[[str], Awaitable[list[str]]]
"""Resolves a name to its IP addresses; ``OSError`` if it has none or no resolver answers."""

_RESOLVE_WITHIN_S = 5.0
"""Time limit of a DNS lookup; the last known addresses are used past it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One address as it was given."""

    host: str
    """A name that stands for addresses; empty where the address is one already."""
    port: str


class RemoteReplicas(Generic[PortT]):
    """``outrider_coordinator.routing.replicas.Source``: one port for each address behind the names of a list."""

    def __init__(
        self,
        addresses: str,
        connect: Callable[[str, ClientSecurity], PortT],
        security: ClientSecurity = OPEN_CLIENT,
        *,
        interval_s: float,
        setting: str = "address",
        resolve: Resolve | None = None,
    ) -> None:
        """``addresses`` are separated by commas; ``ConfigError`` names ``setting`` when one is none."""
        self.interval_s: float | None = interval_s
        self._connect, self._security = connect, security
        self._resolve = resolve or resolve_host
        self._places = {address: _place(setting, address, security) for address in _split(setting, addresses)}
        self._known: dict[str, list[str]] = {}
        self._troubled: set[str] = set()
        self._ports: dict[str, PortT] = {}

    async def find(self) -> dict[str, PortT]:
        """Return the ports by address; ``UnavailableError`` if no name could ever be resolved."""
        troubles = [trouble for address in self._places if (trouble := await self._look_up(address))]
        named = {found: address for address in self._places for found in self._known.get(address, ())}
        if not named and troubles:
            raise UnavailableError("; ".join(troubles))
        self._ports = {found: self._ports.get(found) or self._open(found, address) for found, address in named.items()}
        return dict(self._ports)

    async def _look_up(self, address: str) -> str:
        """Note what an address stands for now; the trouble if that cannot be told."""
        place = self._places[address]
        if not place.host:
            self._known[address] = [address]
            return ""
        try:
            async with asyncio.timeout(_RESOLVE_WITHIN_S):
                found = await self._resolve(place.host)
        except (OSError, TimeoutError) as error:
            trouble = f"{place.host} cannot be resolved: {getattr(error, 'strerror', None) or 'no answer in time'}"
            if address not in self._troubled and self._known:
                _log.warning("%s; its last addresses remain in use", trouble)
            self._troubled.add(address)
            return trouble
        self._troubled.discard(address)
        self._known[address] = sorted(join_address(ip, int(place.port)) for ip in found)
        return ""

    def _open(self, found: str, address: str) -> PortT:
        # Certificates bear the requested name, not the address behind it.
        return self._connect(found, self._security.named(self._places[address].host))


async def resolve_host(host: str) -> list[str]:
    """Resolve a name to IP addresses of one family: a replica with one address of each family counts once."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, set()).add(str(address[0]))
    return sorted(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())


def _split(setting: str, addresses: str) -> list[str]:
    found = [address.strip() for address in addresses.split(",")]
    if not all(found):
        raise ConfigError(setting, f"should be addresses separated by commas, not {addresses!r}")
    return list(dict.fromkeys(found))


def _place(setting: str, address: str, security: ClientSecurity) -> _Place:
    security.check(check_address(address, setting=setting))
    if address.startswith("unix:"):
        return _Place("", "")
    host, port = split_address(address)
    return _Place("" if _is_literal(host) else host, port)


def _is_literal(host: str) -> bool:
    """True if a host needs no resolver: an IP address, or this machine, whose both families are one."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
