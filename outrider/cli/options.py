"""Flags that several commands share, and what an error of ours looks like on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from outrider.client import Client, Tls
from outrider.errors import OutriderError
from outrider.transport.security import TokenFile

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
"""For a command's ``context_settings``."""

Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="OUTRIDER_ADDRESS",
        show_envvar=True,
        help="Where the coordinator is: host:port or unix:/path; several by commas.",
        rich_help_panel="Server",
    ),
]
UseTls = Annotated[bool, typer.Option("--tls", help="Speak TLS, trusting public authorities.")]
TlsCaFile = Annotated[
    str | None, typer.Option("--tls-ca-file", help="Speak TLS, trusting these authorities (PEM). OUTRIDER_TLS_CA_FILE.")
]
TlsCertFile = Annotated[
    str | None, typer.Option("--tls-cert-file", help="Certificate to show, for mutual TLS. OUTRIDER_TLS_CERT_FILE.")
]
TlsKeyFile = Annotated[str | None, typer.Option("--tls-key-file", help="Its private key. OUTRIDER_TLS_KEY_FILE.")]
TlsServerName = Annotated[
    str | None, typer.Option("--tls-server-name", help="Name in the server's certificate. OUTRIDER_TLS_SERVER_NAME.")
]
TokenFilePath = Annotated[
    str | None,
    typer.Option("--token-file", help="File with the bearer token; the variable OUTRIDER_API_TOKEN holds it itself."),
]
AllowPlaintextToken = Annotated[
    bool, typer.Option("--allow-plaintext-token", help="Send the token without TLS, where the network is trusted.")
]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; -vv shows the services' logs.")]

progress = Console(stderr=True, highlight=False, soft_wrap=True)
"""What is on its way, for people; never part of a command's result."""

output = Console(highlight=False, soft_wrap=True)
"""A command's result."""


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
    """A client as the flags say; what they leave open the environment says."""
    named = Tls(tls_ca_file, tls_cert_file, tls_key_file, tls_server_name)
    return Client(
        address,
        tls=named if tls or named != Tls() else None,
        token=None if token_file is None else TokenFile("token_file", token_file).first(),
        allow_plaintext_token=allow_plaintext_token,
    )


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """An ``OutriderError`` becomes one line on standard error and exit code 1."""
    try:
        yield
    except OutriderError as error:
        progress.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
