"""TLS: gRPC credentials from files, renewed when the files change.

A server checks its files at every new connection, a client when it reconnects, so certificates may be rotated without a
restart. If files are unusable after a rotation, the server keeps the previous ones and logs a warning.

The module that parses certificates is imported with the first one, so ``cryptography`` is not needed without TLS.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType

import grpc

from outrider.errors import ConfigError, OutriderError
from outrider.tls import Tls
from outrider.transport.security.files import Stamp, stamp

_log = logging.getLogger(__name__)


def client_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Credentials from the current files; ``ConfigError`` names an unusable file."""
    files = _files()
    authority = None if tls.ca_file is None else files.read_authority(f"{tls.prefix}ca_file", tls.ca_file)
    if tls.cert_file is None or tls.key_file is None:
        return grpc.ssl_channel_credentials(authority)
    pair = files.read_pair(f"{tls.prefix}cert_file", tls.cert_file, f"{tls.prefix}key_file", tls.key_file)
    return grpc.ssl_channel_credentials(authority, *pair)


def client_stamp(tls: Tls) -> Stamp:
    """Value that differs if a file has changed."""
    return stamp((tls.ca_file, tls.cert_file, tls.key_file))


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS configuration of a server. With ``client_ca_file`` clients must present a certificate (mutual TLS)."""

    cert_file: str
    """The certificate chain (PEM), the server's own first."""
    key_file: str
    """Private key of the certificate."""
    client_ca_file: str | None = None
    """Certificates of the authorities that vouch for clients."""

    def credentials(self) -> grpc.ServerCredentials:
        """Server credentials from the files at each connection; ``ConfigError`` for unusable files."""
        rotation = _Rotation(self)
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            rotation.fetch,  # type: ignore[arg-type]  # None means unchanged, which the stub leaves out
            self.client_ca_file is not None,
        )

    def stamp(self) -> Stamp:
        """Value that differs if a file has changed."""
        return stamp((self.cert_file, self.key_file, self.client_ca_file))

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        files, authority = _files(), None
        pair = files.read_pair("tls_cert_file", self.cert_file, "tls_key_file", self.key_file)
        if self.client_ca_file is not None:
            authority = files.read_authority("tls_client_ca_file", self.client_ca_file)
        return grpc.ssl_server_certificate_configuration([pair], authority)


def _files() -> ModuleType:
    """Module that reads certificates; ``ConfigError`` where its package is not installed."""
    try:
        from outrider.transport.security import certificates
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise ConfigError("tls", "needs the package cryptography: pip install cryptography") from error
    return certificates


class _Rotation:
    """Checks a server's files at each new connection, in gRPC's thread."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._seen = tls.stamp()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the content of the files; None if it is unchanged or unusable."""
        found = self._tls.stamp()
        if found == self._seen:
            return None
        self._seen = found
        try:
            configuration = self._tls._configuration()
        except OutriderError as error:
            _log.warning("the new certificate is not taken, the one in use stays: %s", error)
            return None
        _log.info("the certificate in %s was rotated", self._tls.cert_file)
        return configuration
