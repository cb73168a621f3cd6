"""Environment variables of clients, which are not settings of a service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:50050"

CLIENT_VARIABLES = {
    "OUTRIDER_ADDRESS": "Where the coordinator is: host:port or unix:/path, several by commas; else 127.0.0.1:50050.",
    "OUTRIDER_API_TOKEN": "The bearer token to bring.",
    "OUTRIDER_ALLOW_PLAINTEXT_TOKEN": "1: send it to another host without TLS, where the network is trusted.",
    "OUTRIDER_TLS": "1: speak TLS, trusting public authorities where no ca file is named.",
    "OUTRIDER_TLS_CA_FILE": "Authorities (PEM) of the server's certificate; implies TLS, as do those below.",
    "OUTRIDER_TLS_CERT_FILE": "Certificate chain (PEM) to show, where the server asks for one (mutual TLS).",
    "OUTRIDER_TLS_KEY_FILE": "Its private key (PEM, without a password).",
    "OUTRIDER_TLS_SERVER_NAME": "Name that the server's certificate bears, where that is not the address's host.",
}
"""Name -> meaning."""

_SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """The variables that are set."""

    address: str
    token: str | None
    allow_plaintext_token: bool
    tls: bool
    """True if TLS is asked for, by its switch or by any of the variables about it."""
    tls_ca_file: str | None
    tls_cert_file: str | None
    tls_key_file: str | None
    tls_server_name: str | None


def client_environment(environ: Mapping[str, str] | None = None) -> ClientEnvironment:
    """Read the current environment; an empty variable counts as unset. ``ConfigError`` for an invalid switch."""
    environ = os.environ if environ is None else environ
    names = ("CA_FILE", "CERT_FILE", "KEY_FILE", "SERVER_NAME")
    ca_file, cert_file, key_file, server_name = (environ.get(f"OUTRIDER_TLS_{name}") or None for name in names)
    return ClientEnvironment(
        address=environ.get("OUTRIDER_ADDRESS") or DEFAULT_ADDRESS,
        token=environ.get("OUTRIDER_API_TOKEN") or None,
        allow_plaintext_token=_switch(environ, "OUTRIDER_ALLOW_PLAINTEXT_TOKEN"),
        tls=_switch(environ, "OUTRIDER_TLS") or any((ca_file, cert_file, key_file, server_name)),
        tls_ca_file=ca_file,
        tls_cert_file=cert_file,
        tls_key_file=key_file,
        tls_server_name=server_name,
    )


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "")
    if value.lower() not in _SWITCHES:
        raise ConfigError(name, f"should be 1 or 0, not {value!r}")
    return _SWITCHES[value.lower()]
