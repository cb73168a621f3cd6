"""Security of each connection from the settings: requirements of servers, credentials of clients."""

from __future__ import annotations

from outrider.config import CoordinatorSettings, DraftSettings, TargetSettings
from outrider.tls import Tls
from outrider.transport.security.sides import ClientSecurity, ServerSecurity
from outrider.transport.security.tls import ServerTls
from outrider.transport.security.tokens import TokenFile


def service_security(settings: TargetSettings | DraftSettings) -> ServerSecurity:
    """Requirements of a draft or target for coordinators."""
    return ServerSecurity(_server_tls(settings), _tokens("link_token_file", settings.link_token_file))


def public_security(settings: CoordinatorSettings) -> ServerSecurity:
    """Requirements of a coordinator for users."""
    return ServerSecurity(_server_tls(settings), _tokens("api_token_file", settings.api_token_file))


def link_security(settings: CoordinatorSettings | DraftSettings) -> ClientSecurity:
    """Credentials of a coordinator for its draft and target, and of a draft for targets of other hosts."""
    tokens = _tokens("link_token_file", settings.link_token_file)
    return ClientSecurity(
        tls=_link_tls(settings) if isinstance(settings, CoordinatorSettings) else _channel_tls(settings),
        token=None if tokens is None else tokens.first,
        allow_plaintext_token=settings.allow_plaintext_link_token,
        token_setting="link_token_file",
    )


def _server_tls(settings: TargetSettings | DraftSettings | CoordinatorSettings) -> ServerTls | None:
    if settings.tls_cert_file is None or settings.tls_key_file is None:  # both or neither: the schema sees to it
        return None
    return ServerTls(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)


def _link_tls(settings: CoordinatorSettings) -> Tls | None:
    if settings.link_tls_ca_file is None:
        return None
    return Tls(
        ca_file=settings.link_tls_ca_file,
        cert_file=settings.link_tls_cert_file,
        key_file=settings.link_tls_key_file,
        server_name=settings.link_tls_server_name,
        prefix="link_tls_",
    )


def _channel_tls(settings: DraftSettings) -> Tls | None:
    """A draft shows targets the certificate that it shows coordinators."""
    if settings.link_tls_ca_file is None:
        return None
    return Tls(ca_file=settings.link_tls_ca_file, cert_file=settings.tls_cert_file, key_file=settings.tls_key_file)


def _tokens(setting: str, path: str | None) -> TokenFile | None:
    return None if path is None else TokenFile(setting, path)
