"""Addresses of coordinators: parsing, and the order in which they are tried."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from outrider.addresses import check_address
from outrider.config.client import client_environment
from outrider.errors import ConfigError

DOWN_S = 30.0
"""Time during which an address that did not answer is tried after the others, in seconds."""
CONNECT_ATTEMPT_MS = 2_000
"""Connection timeout if there is another address to try, in milliseconds."""


def named_addresses(address: str | Iterable[str] | None, *more: str) -> tuple[str, ...]:
    """Addresses from the arguments of a client, else from ``OUTRIDER_ADDRESS``, which a ``ConfigError`` then names."""
    if address is not None:
        return parse_addresses(address, *more)
    return parse_addresses(client_environment().address, setting="OUTRIDER_ADDRESS")


def parse_addresses(address: str | Iterable[str], *more: str, setting: str = "address") -> tuple[str, ...]:
    """Addresses from one text ("a:1" or "a:1,b:2"), a list of texts, or several arguments; duplicates are removed.

    Raises ``ConfigError``, which names the ``setting``, if there is none or one has no valid form.
    """
    given = [address] if isinstance(address, str) or not isinstance(address, Iterable) else list(address)
    named = [*given, *more]
    if len(named) == 1 and isinstance(named[0], str):  # elsewhere a comma may be part of a socket's path
        named = named[0].split(",")
    for name in named:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(setting, f"should be host:port or unix:/path, or several of them, not {name!r}")
    if not named:
        raise ConfigError(setting, "at least one must be given")
    return tuple(dict.fromkeys(check_address(name.strip(), setting=setting) for name in named))


class Addresses:
    """Coordinators that serve one model, in order of preference. Thread-safe."""

    def __init__(self, names: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.names = tuple(names)
        self._clock = clock
        self._down_since: dict[str, float] = {}

    @property
    def connect_attempt_ms(self) -> int | None:
        """Connection timeout for one of them in milliseconds; None: the default timeout."""
        return CONNECT_ATTEMPT_MS if len(self.names) > 1 else None

    def in_order(self) -> list[str]:
        """All addresses. Those that failed recently come last, the one that failed first before the others."""
        recent = self._clock() - DOWN_S
        down = {name: since for name, since in tuple(self._down_since.items()) if since > recent}
        return sorted(self.names, key=lambda name: down.get(name, -math.inf))

    def note_down(self, name: str) -> None:
        """Record that the address did not answer, or broke off."""
        self._down_since[name] = self._clock()

    def note_up(self, name: str) -> None:
        """Record that the address answered."""
        self._down_since.pop(name, None)
