"""TLS settings of a connection: paths and names, as plain values. Files are read by ``outrider.transport.security``."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of a client. Without ``ca_file`` the public authorities that come with gRPC are trusted."""

    ca_file: str | None = None
    """Certificates (PEM) of the authorities that vouch for the server."""
    cert_file: str | None = None
    """Certificate chain of this side, where the server asks for one (mutual TLS)."""
    key_file: str | None = None
    """Private key of the certificate."""
    server_name: str | None = None
    """The name that the server's certificate has to bear; None is the host of the address."""
    prefix: str = field(default="tls_", repr=False)
    """Prefix of the settings behind these fields, for messages: "tls_" gives "tls_ca_file"."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            given, lacking = ("cert_file", "key_file") if self.key_file is None else ("key_file", "cert_file")
            raise ConfigError(self.prefix + lacking, f"is needed together with {self.prefix}{given}")
