"""Test whether a server uses TLS: gRPC's errors do not distinguish a TLS server from one that is ending."""

from __future__ import annotations

import socket
import ssl

from outrider.addresses import split_address

_TIMEOUT_S = 0.5


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
