"""Flags shared by several commands, and the form of errors on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.client import Client, Tls
from outrider.errors import ConfigError, OutriderError
from outrider.transport.security import TokenFile

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
"""Value of a command's ``context_settings``."""


def _server(text: str, name: str, *, has_variable: bool = False) -> Any:  # noqa: ANN401 - typer's own type
    """``has_variable``: OUTRIDER_ and the name set the option too, which its text says."""
    variable = f"OUTRIDER_{name.lstrip('-').replace('-', '_').upper()}" if has_variable else None
    return typer.Option(name, help=text, rich_help_panel=SERVER, envvar=variable, show_envvar=False)


SERVER = "Server"
"""Group of the flags that say which server, and how it is reached."""

Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="OUTRIDER_ADDRESS",
        show_envvar=True,
        help="Address of the coordinator: host:port or unix:/path; several separated by commas.",
        rich_help_panel=SERVER,
    ),
]
UseTls = Annotated[bool, _server("Use TLS with the public certificate authorities.", "--tls")]
TlsCaFile = Annotated[
    str | None,
    _server(
        "Use TLS with these certificate authorities (PEM). OUTRIDER_TLS_CA_FILE.", "--tls-ca-file", has_variable=True
    ),
]
TlsCertFile = Annotated[
    str | None,
    _server("Client certificate, for mutual TLS. OUTRIDER_TLS_CERT_FILE.", "--tls-cert-file", has_variable=True),
]
TlsKeyFile = Annotated[
    str | None,
    _server("Private key of the client certificate. OUTRIDER_TLS_KEY_FILE.", "--tls-key-file", has_variable=True),
]
TlsServerName = Annotated[
    str | None,
    _server("Name in the server's certificate. OUTRIDER_TLS_SERVER_NAME.", "--tls-server-name", has_variable=True),
]
TokenFilePath = Annotated[
    str | None,
    _server("File with the bearer token. OUTRIDER_API_TOKEN holds the token itself.", "--token-file"),
]
AllowPlaintextToken = Annotated[
    bool, _server("Send the token without TLS, in a trusted network.", "--allow-plaintext-token")
]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Show more output; -vv shows the logs of the services."
    ),
]

progress = Console(stderr=True, highlight=False, soft_wrap=True)
"""Progress messages, on standard error."""

output = Console(highlight=False, soft_wrap=True)
"""Results of commands, on standard output."""


def connect(
    address: str,
    *,
    tls: bool,
    tls_ca_file: str | None,
    tls_cert_file: str | None,
    tls_key_file: str | None,
    tls_server_name: str | None,
    token_file: str | None,
    allow_plaintext_token: bool,
) -> Client:
    """Return a client configured by the flags, or by the environment where a flag is absent."""
    named = Tls(tls_ca_file, tls_cert_file, tls_key_file, tls_server_name)
    token = None if token_file is None else TokenFile("token_file", token_file).first()
    try:
        return Client(
            address,
            tls=named if tls or named != Tls() else None,
            token=token,
            allow_plaintext_token=allow_plaintext_token,
        )
    except ConfigError as error:
        if error.field != "token":
            raise
        problem = error.problem.replace("allow_plaintext_token", "--allow-plaintext-token")
        raise ConfigError("OUTRIDER_API_TOKEN" if token is None else "token_file", problem) from error


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn an ``OutriderError`` into one line on standard error and exit code 1."""
    try:
        yield
    except OutriderError as error:
        progress.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
