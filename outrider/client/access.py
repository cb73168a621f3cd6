"""Credentials and trust of a client, from arguments or from the environment."""

from __future__ import annotations

from collections.abc import Callable

from outrider.config.client import ClientEnvironment, client_environment
from outrider.errors import ConfigError
from outrider.tls import Tls
from outrider.transport.security import ClientSecurity
from outrider.transport.security.tokens import check_token


def client_security(
    tls: Tls | bool | None, token: str | Callable[[], str | None] | None, *, allow_plaintext_token: bool
) -> ClientSecurity:
    """Return the security of a client from its arguments; None means that the environment decides.

    A ``token`` that is a function is called before each request. ``tls`` True uses the public certificate authorities,
    False disables TLS whatever the environment says. Raises ``ConfigError`` for a token that a header cannot contain.
    """
    environment = client_environment()
    token = environment.token if token is None else token
    if token is not None and not callable(token):
        if not isinstance(token, str):
            raise ConfigError("token", f"should be a text, or a function that returns one, not {type(token).__name__}")
        check_token("token", token)
    return ClientSecurity(
        tls=_tls(tls, environment),
        token=token if token is None or callable(token) else lambda: token,
        allow_plaintext_token=allow_plaintext_token or environment.allow_plaintext_token,
    )


def _tls(tls: Tls | bool | None, environment: ClientEnvironment) -> Tls | None:
    if isinstance(tls, Tls):
        return tls
    if tls is not None:
        return Tls() if tls else None
    if not environment.tls:
        return None
    return Tls(
        ca_file=environment.tls_ca_file,
        cert_file=environment.tls_cert_file,
        key_file=environment.tls_key_file,
        server_name=environment.tls_server_name,
    )
