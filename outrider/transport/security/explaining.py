"""TLS causes of failed connections, in words that say what would be right.

gRPC tells a failed handshake by a text of its TLS library; that table is here. A peer that closes the connection during
the handshake says no more than that it did: TLS 1.3 lets a client believe it is connected before the server has judged
the client's certificate. A process that is ending closes its connections too, so TLS is named only where the server at
the address does speak it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from outrider.addresses import split_address
from outrider.tls import Tls

_TIMEOUT_S = 0.5
"""Longest wait for a peer's first bytes, which tell whether it speaks TLS; an error message waits for it."""


def speaks_tls(address: str) -> bool:
    """True if the server at "host:port" answers a TLS handshake; blocks for at most a second."""
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # nothing is sent to it that needs trust
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, int(port)), _TIMEOUT_S) as plain:
            return _shakes_hands(context, plain, host)
    except (OSError, ValueError):  # the peer is gone, or it is a socket file
        return False


def _shakes_hands(context: ssl.SSLContext, plain: socket.socket, host: str) -> bool:
    try:
        with context.wrap_socket(plain, server_hostname=host):
            return True
    except ssl.SSLError as error:  # an alert is an answer in TLS; an early end or other bytes are none
        return "ALERT" in (error.reason or "")


_ADDRESS = "ADDRESS"
_CLOSED = ("Socket closed", "Connection reset", "Broken pipe", "EOF")


def explain(details: str, address: str, tls: Tls | None, *, probe: Callable[[str], bool] = speaks_tls) -> str | None:
    """Explain the error text of a failed connection; None if TLS is not the cause.

    ``probe`` tests whether the server at an address uses TLS; it may block for a second, and is called if the
    connection was closed at once.
    """
    if tls is None:
        return _explain_plain(details, address, probe)
    for found, message in (
        ("certificate has expired", f"the certificate of {_ADDRESS} has expired; it needs a new one"),
        ("certificate is not yet valid", f"the certificate of {_ADDRESS} is not valid yet; are the clocks right?"),
        ("CERTIFICATE_VERIFY_FAILED", _untrusted(tls)),
        ("Hostname Verification Check failed", _misnamed(tls)),
        ("WRONG_VERSION_NUMBER", _plain_server(tls)),
    ):
        if found in details:
            return message.replace(_ADDRESS, address)
    return _explain_closed(details, address, tls, probe)


def _explain_plain(details: str, address: str, probe: Callable[[str], bool]) -> str | None:
    if not _is_closed_at_once(details) or not probe(address):
        return None
    return f"{address} speaks TLS and closed the connection; this side should speak it as well (tls_ca_file)"


def _explain_closed(details: str, address: str, tls: Tls, probe: Callable[[str], bool]) -> str | None:
    if not _is_closed_at_once(details) or not probe(address):
        return None
    if tls.cert_file is None:
        return (
            f"{address} closed the connection during the TLS handshake; if it asks for a client certificate,"
            f" {tls.prefix}cert_file and {tls.prefix}key_file should name one"
        )
    return (
        f"{address} closed the connection during the TLS handshake; it may not trust the client certificate in"
        f" {tls.cert_file} ({tls.prefix}cert_file)"
    )


def _is_closed_at_once(details: str) -> bool:
    return "failed to connect" in details and any(text in details for text in _CLOSED)


def _untrusted(tls: Tls) -> str:
    trusted = tls.ca_file or "the public list"
    return (
        f"{_ADDRESS} shows a certificate that no authority in {trusted} has signed; {tls.prefix}ca_file should hold"
        " the authority that issued it"
    )


def _misnamed(tls: Tls) -> str:
    name = "its host" if tls.server_name is None else repr(tls.server_name)
    return (
        f"the certificate of {_ADDRESS} is not for {name}; {tls.prefix}server_name should be a name in the certificate"
    )


def _plain_server(tls: Tls) -> str:
    return (
        f"{_ADDRESS} does not speak TLS; it should be given a certificate (tls_cert_file), or this side no"
        f" {tls.prefix}ca_file"
    )
