"""Channels: limits, keepalive and security of every gRPC connection.

Addresses are "host:port" or "unix:/path".
"""

from __future__ import annotations

import grpc
import grpc.aio

from outrider.addresses import check_address
from outrider.tls import Tls
from outrider.transport.security import OPEN_CLIENT, ClientSecurity, client_credentials

MAX_LINK_MESSAGE_BYTES = 256 << 20
"""Longest message from a service to a coordinator: a description has the tokenizer's files."""
MAX_COMMANDS_BYTES = 64 << 20
"""Longest message to a service, from any client where it asks for no token; each call holds it while it arrives.
One command is shorter: it brings hidden states of up to 48 MiB, or evidence of up to 32 MiB.
"""
MAX_PUBLIC_MESSAGE_BYTES = 64 << 20
"""A result with logprobs of a long prompt."""
MAX_REQUEST_BYTES = 8 << 20
"""Longest message from a user: more than any prompt that ``outrider.requests`` lets pass."""
CONNECT_ATTEMPT_MS = 5_000
"""Longest attempt of a channel to connect."""
MAX_BACKOFF_MS = 2_000
"""Longest pause between two attempts of a channel to connect."""

Options = list[tuple[str, int | str]]


def keepalive(time_ms: int, timeout_ms: int) -> Options:
    """Keepalive options: a ping after ``time_ms`` without data; the connection ends if nothing arrives for
    ``timeout_ms`` more. gRPC answers pings from its own threads, so a peer that computes still answers.
    """
    return [
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # gRPC measures round trips by pings too. One of those that is under way keeps the keepalive's from being sent,
        # and its own timeout is a minute.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


KEEPALIVE = keepalive(20_000, 10_000)
"""Keepalive of servers, to free what they hold for a client that is gone without a word, and of links, which have
heartbeats."""
CLIENT_KEEPALIVE = keepalive(5_000, 5_000)
"""Keepalive of the SDK: a coordinator that is gone without a word is noticed within 10 s. gRPC's servers end a
connection that pings more often than they allow; ours allow any number, and always did.
"""

FIXED_WINDOW: Options = [("grpc.http2.bdp_probe", 0)]
"""Flow control window of the SDK: a stream has 64 KiB under way, or one message. gRPC would let it grow to 4 MiB, so
that a stream that is not read, also that of a gateway's client, would be computed to its end.
"""
CLIENT_OPTIONS = [*CLIENT_KEEPALIVE, *FIXED_WINDOW]


def message_limits(max_bytes: int, *, max_received_bytes: int | None = None) -> Options:
    """Message size options of a server or a channel; ``max_received_bytes`` if it differs from the sending limit."""
    received = max_bytes if max_received_bytes is None else max_received_bytes
    return [("grpc.max_receive_message_length", received), ("grpc.max_send_message_length", max_bytes)]


def _client_options(
    max_bytes: int, tls: Tls | None, connect_attempt_ms: int | None, *, max_backoff_ms: int, more: Options
) -> Options:
    attempt_ms = CONNECT_ATTEMPT_MS if connect_attempt_ms is None else connect_attempt_ms
    # A name in place of the address's own host: in the certificate, and as the authority that calls name.
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls is not None and tls.server_name else []
    return [
        *named,
        *message_limits(max_bytes),
        *more,
        # Addresses of peers are settings; a proxy from the environment is for addresses outside of the deployment.
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # The least time for a connection attempt, whatever the backoff: a busy host answers late.
        ("grpc.min_reconnect_backoff_ms", attempt_ms),
        # A name that cannot be resolved is reported after the same time.
        ("grpc.dns_ares_query_timeout", attempt_ms),
        ("grpc.max_reconnect_backoff_ms", max_backoff_ms),
        # Each port object owns its connection: a broken one is not shared with another.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def open_channel(
    address: str,
    security: ClientSecurity = OPEN_CLIENT,
    *,
    max_message_bytes: int = MAX_PUBLIC_MESSAGE_BYTES,
    connect_attempt_ms: int | None = None,
    max_backoff_ms: int = MAX_BACKOFF_MS,
    more: Options = KEEPALIVE,
) -> grpc.aio.Channel:
    """Open a channel of the running event loop, which connects at the first call. ``ConfigError`` for unusable
    files.
    """
    tls = _tls(address, security)
    options = _client_options(max_message_bytes, tls, connect_attempt_ms, max_backoff_ms=max_backoff_ms, more=more)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, client_credentials(tls), options=options)


def open_blocking_channel(
    address: str,
    security: ClientSecurity = OPEN_CLIENT,
    *,
    max_message_bytes: int = MAX_PUBLIC_MESSAGE_BYTES,
    connect_attempt_ms: int | None = None,
    max_backoff_ms: int = MAX_BACKOFF_MS,
    more: Options = KEEPALIVE,
) -> grpc.Channel:
    """Open a channel for synchronous code, which connects at the first call. ``ConfigError`` for unusable files."""
    tls = _tls(address, security)
    options = _client_options(max_message_bytes, tls, connect_attempt_ms, max_backoff_ms=max_backoff_ms, more=more)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, client_credentials(tls), options=options)


def _tls(address: str, security: ClientSecurity) -> Tls | None:
    security.check(check_address(address))
    return security.tls_for(address)
