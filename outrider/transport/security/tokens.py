"""Bearer tokens: a file of those that are taken, the check of every call, and the metadata that carries one.

A file holds one token a line; empty lines and lines that begin with "#" are passed over. It is read again when it has
changed. Health and reflection ask for no token: probes have none, and neither tells what is not public.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from outrider.errors import ConfigError, UnauthenticatedError
from outrider.transport.security.files import read, stamp

_log = logging.getLogger(__name__)
NO_TOKEN = "this service asks for a bearer token"
"""The refusal of a call without any."""
_HEADER = "authorization"
_SCHEME = "bearer "
OWN_METHODS = "/outrider."
"""Prefix of the methods that need a token; those of health and reflection do not."""


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with this token."""
    return () if token is None else ((_HEADER, f"Bearer {token}"),)


def check_token(setting: str, token: str) -> str:
    """The token itself; ``ConfigError`` for one that a header cannot carry, without telling it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(setting, "a token should be one word of printable ASCII characters")
    return token


class TokenFile:
    """The tokens of a file, as it is now."""

    def __init__(self, setting: str, path: str) -> None:
        """``ConfigError`` when the file cannot be read or holds no token."""
        self._setting, self._path = setting, path
        self._seen = stamp((path,))
        self._tokens = self._read()

    def first(self) -> str:
        """The token to send."""
        self._refresh()
        return self._tokens[0]

    def accepts(self, token: str) -> bool:
        """True if it is one of them; takes as long for a wrong one as for a right one."""
        self._refresh()
        given = hashlib.sha256(token.encode()).digest()
        matches = [hmac.compare_digest(given, hashlib.sha256(known.encode()).digest()) for known in self._tokens]
        return any(matches)

    def cache_salt(self, token: str) -> str:
        """Cache salt of requests with this token that name none: equal wherever the token is, and empty if it is the
        only one. The prefix cache would otherwise tell the holder of one token which prompts others have sent.
        """
        self._refresh()
        return hashlib.sha256(b"outrider cache salt\0" + token.encode()).hexdigest()[:32] if self._has_several() else ""

    def _has_several(self) -> bool:
        return len(set(self._tokens)) > 1

    def _refresh(self) -> None:
        found = stamp((self._path,))
        if found == self._seen:
            return
        self._seen = found
        try:
            self._tokens = self._read()
        except ConfigError as error:
            _log.warning("the new tokens are not taken, those in use stay: %s", error)

    def _read(self) -> tuple[str, ...]:
        try:
            lines = [line.strip() for line in read(self._setting, self._path).decode().splitlines()]
        except UnicodeDecodeError as error:
            raise ConfigError(self._setting, f"{self._path} should be a text file with one token a line") from error
        tokens = tuple(check_token(self._setting, line) for line in lines if line and not line.startswith("#"))
        if not tokens:
            raise ConfigError(self._setting, f"{self._path} holds no token; there should be one a line")
        return tokens


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of our services that bring no token of the file."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - a handler has no public type that can be rebuilt
        """The handler, or one that only refuses."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OWN_METHODS):
            return handler
        given = bearer_token(handler_call_details.invocation_metadata)
        if given is not None and self._tokens.accepts(given):
            return handler
        problem = NO_TOKEN if given is None else "the bearer token is not known here"
        return _refusing(handler, problem)


def bearer_token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The token of a call's metadata; None without one."""
    for key, value in metadata or ():
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        if key == _HEADER and text[: len(_SCHEME)].lower() == _SCHEME:
            return text[len(_SCHEME) :].strip()
    return None


def _refusing(handler: Any, problem: str) -> Any:  # noqa: ANN401
    """A handler that refuses before it reads: what it would read, a stranger would have us hold first."""

    async def refuse(requests: object, context: object) -> AsyncGenerator[None, None]:
        raise UnauthenticatedError(problem)
        yield

    return grpc.stream_stream_rpc_method_handler(refuse, handler.request_deserializer, handler.response_serializer)
