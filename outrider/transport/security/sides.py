"""The two sides of a connection: requirements of the server, credentials of the client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.addresses import is_loopback, split_address
from outrider.errors import ConfigError
from outrider.tls import Tls
from outrider.transport.security.files import Stamp
from outrider.transport.security.tls import ServerTls, client_stamp
from outrider.transport.security.tokens import TokenFile, token_metadata

_log = logging.getLogger(__name__)
_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """Requirements of a server; none by default."""

    tls: ServerTls | None = None
    tokens: TokenFile | None = None

    def check(self, host: str) -> None:
        """Warn if tokens are readable on the network; ``ConfigError`` for TLS on a unix socket."""
        if self.tls is not None and host.startswith(_UNIX):
            raise ConfigError(
                "tls_cert_file", f"is of no use on {host}: a socket file is guarded by its permissions; leave it out"
            )
        if self.tokens is not None and self.tls is None and not is_loopback(host):
            _log.warning(
                "tokens are required on %s without TLS and are readable on the network; set tls_cert_file,"
                " or allow only a proxy with TLS to reach this port",
                host,
            )


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Credentials of a client; none by default."""

    tls: Tls | None = None
    """TLS settings, unused for socket files, which are guarded by their permissions."""
    token: Callable[[], str | None] | None = None
    """The bearer token to send now; None for a call without one."""
    allow_plaintext_token: bool = False
    """True if the token may go to another host without TLS."""
    token_setting: str = "token"
    """Name of the token's setting in messages."""

    def tls_for(self, address: str) -> Tls | None:
        """The TLS configuration for an address; None for plain text."""
        return None if address.startswith(_UNIX) else self.tls

    def named(self, host: str) -> ClientSecurity:
        """Security of a connection to an address of ``host``, whose name certificates bear; empty: no other name."""
        if self.tls is None or self.tls.server_name is not None or not host:
            return self
        return replace(self, tls=replace(self.tls, server_name=host))

    def check(self, address: str) -> None:
        """Raise ``ConfigError`` for a token that would be readable on the network to ``address``."""
        host = address if address.startswith(_UNIX) else split_address(address)[0]
        if self.token is None or self.tls_for(address) is not None or self.allow_plaintext_token or is_loopback(host):
            return
        raise ConfigError(
            self.token_setting,
            f"would go to {address} unencrypted; TLS should be on, or plaintext tokens allowed where the network is"
            " trusted (allow_plaintext_token)",
        )

    def stamp(self) -> Stamp:
        """Value that differs if a certificate file has changed."""
        return () if self.tls is None else client_stamp(self.tls)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return token_metadata(None if self.token is None else self.token())


OPEN_SERVER = ServerSecurity()
OPEN_CLIENT = ClientSecurity()
