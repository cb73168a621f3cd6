"""Flags that name the coordinator which a command calls, and how it is reached."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from outrider.client import Client, Tls
from outrider.config.client import DEFAULT_ADDRESS
from outrider.errors import ConfigError
from outrider.transport.security import TokenFile

_PANEL = "Server"
"""Group of these flags in a command's help."""


def _flag(text: str, name: str, *, has_variable: bool = False) -> Any:  # noqa: ANN401 - typer's own type
    """``has_variable``: OUTRIDER_ and the name set the option too, which its text says."""
    variable = f"OUTRIDER_{name.lstrip('-').replace('-', '_').upper()}" if has_variable else None
    return typer.Option(name, help=text, rich_help_panel=_PANEL, envvar=variable, show_envvar=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ServerFlags:
    """Values of the flags, each field one of them. Where a flag is absent the environment counts."""

    address: Annotated[
        str,
        typer.Option(
            "--address",
            "-a",
            envvar="OUTRIDER_ADDRESS",
            show_envvar=True,
            help="Address of the coordinator: host:port or unix:/path; several separated by commas.",
            rich_help_panel=_PANEL,
        ),
    ] = DEFAULT_ADDRESS
    tls: Annotated[bool, _flag("Use TLS with the public certificate authorities.", "--tls")] = False
    tls_ca_file: Annotated[
        str | None,
        _flag(
            "Use TLS with these certificate authorities (PEM). OUTRIDER_TLS_CA_FILE.",
            "--tls-ca-file",
            has_variable=True,
        ),
    ] = None
    tls_cert_file: Annotated[
        str | None,
        _flag("Client certificate, for mutual TLS. OUTRIDER_TLS_CERT_FILE.", "--tls-cert-file", has_variable=True),
    ] = None
    tls_key_file: Annotated[
        str | None,
        _flag("Private key of the client certificate. OUTRIDER_TLS_KEY_FILE.", "--tls-key-file", has_variable=True),
    ] = None
    tls_server_name: Annotated[
        str | None,
        _flag("Name in the server's certificate. OUTRIDER_TLS_SERVER_NAME.", "--tls-server-name", has_variable=True),
    ] = None
    token_file: Annotated[
        str | None, _flag("File with the bearer token. OUTRIDER_API_TOKEN holds the token itself.", "--token-file")
    ] = None
    allow_plaintext_token: Annotated[
        bool, _flag("Send the token without TLS, in a trusted network.", "--allow-plaintext-token")
    ] = False

    def connect(self) -> Client:
        """A client of that coordinator. ``ConfigError`` for unusable files."""
        named = Tls(self.tls_ca_file, self.tls_cert_file, self.tls_key_file, self.tls_server_name)
        token = None if self.token_file is None else TokenFile("token_file", self.token_file).first()
        try:
            return Client(
                self.address,
                tls=named if self.tls or named != Tls() else None,
                token=token,
                allow_plaintext_token=self.allow_plaintext_token,
            )
        except ConfigError as error:
            if error.field != "token":
                raise
            problem = error.problem.replace("allow_plaintext_token", "--allow-plaintext-token")
            raise ConfigError("OUTRIDER_API_TOKEN" if token is None else "token_file", problem) from error
