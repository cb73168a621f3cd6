"""``outrider info``: what a server serves."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from outrider.cli.options import (
    DEFAULT_ADDRESS,
    Address,
    AllowPlaintextToken,
    TlsCaFile,
    TlsCertFile,
    TlsKeyFile,
    TlsServerName,
    TokenFilePath,
    UseTls,
    connect,
    errors_as_lines,
    output,
)


def info(
    *,
    address: Address = DEFAULT_ADDRESS,
    tls: UseTls = False,
    tls_ca_file: TlsCaFile = None,
    tls_cert_file: TlsCertFile = None,
    tls_key_file: TlsKeyFile = None,
    tls_server_name: TlsServerName = None,
    token_file: TokenFilePath = None,
    allow_plaintext_token: AllowPlaintextToken = False,
) -> None:
    """Show what is served: models, limits, load."""
    with (
        errors_as_lines(),
        connect(
            address,
            tls=tls,
            tls_ca_file=tls_ca_file,
            tls_cert_file=tls_cert_file,
            tls_key_file=tls_key_file,
            tls_server_name=tls_server_name,
            token_file=token_file,
            allow_plaintext_token=allow_plaintext_token,
        ) as client,
    ):
        facts = client.model_info()
    table = Table(show_header=False, box=None, pad_edge=False)
    for field in dataclasses.fields(facts):
        table.add_row(field.name, _text(getattr(facts, field.name)))
    output.print(table)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "none"
    return str(value) or "none"
