"""Interceptor that turns errors into statuses, so that handlers need no try/except."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_status import rpc_status

from outrider.errors import InvalidRequestError, OutriderError
from outrider.limits import CHANNEL_PIECE, LINK_COMMANDS, NAME_MESSAGE, UNUSED_BYTES, RateLimit
from outrider.transport.field_counts import check_num_fields
from outrider.transport.link.counts import LinkCounts
from outrider.transport.malformed import end_stream, tolerant, tolerant_of_link, well_formed
from outrider.transport.short_messages import ShortMessages
from outrider.transport.status import to_status
from outrider.v1 import generation_pb2, link_pb2

_log = logging.getLogger(__name__)
_LINKS = "/Attach"
_CHANNELS = "/OpenChannel"
_REFLECTION = "/grpc.reflection."
_HEALTH = "/grpc.health.v1.Health/Check"
_OWN = f"/{generation_pb2.DESCRIPTOR.package}."
_PUBLIC = f"/{generation_pb2.DESCRIPTOR.services_by_name['GenerationService'].full_name}/"
_WARNING_INTERVAL_S = 10.0
"""Interval of warnings, so that callers cannot fill the log."""
MAX_CALLS = 4096
"""Calls that are open at a time, of all clients and methods; more are RESOURCE_EXHAUSTED. Each takes some 20 kB, also
one that sends nothing or only watches health."""
MAX_CALLS_PER_HOST = MAX_CALLS // 2
"""Bound on the calls of one host over all its connections: one that opens all that it can leaves half to the others.
gRPC's own bound of a connection makes further calls wait in the client, so that unread streams of a gateway's clients
would hold up all others."""

Context = grpc.aio.ServicerContext[Any, Any]
Receive = Callable[[Any, Context], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """An ``OutriderError`` becomes its status; any other error is logged and becomes INTERNAL without its text.

    Messages that cannot be parsed are INVALID_ARGUMENT, calls beyond those that one host may have RESOURCE_EXHAUSTED. A
    link that ends by its caller's fault is one warning, at most
    every ten seconds.
    """

    def __init__(self, max_calls_per_host: int = MAX_CALLS_PER_HOST) -> None:
        self._warnings = RateLimit(_WARNING_INTERVAL_S)
        self._calls = LinkCounts(max_calls_per_host, "calls")
        self._short_messages = ShortMessages()
        self._own_messages = ShortMessages()
        """Messages of our services, which may ask for a token: health checks of other clients take none of their turns.
        """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - a handler has no public type that can be rebuilt
        """Wrap the handler of the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        handler = handler._replace(request_deserializer=_deserializer(method, handler.request_deserializer))
        for shape in ("unary_unary", "stream_unary", "unary_stream", "stream_stream"):
            if (behaviour := getattr(handler, shape)) is not None:
                guarded = self._guarded(behaviour, method, is_of_one=not handler.request_streaming)
                # For gRPC every request is a stream, which is the same on the wire: of other handlers it asks for the
                # message before it calls them, and keeps it until the call ends.
                answers = {shape: None, f"stream_{'stream' if handler.response_streaming else 'unary'}": guarded}
                return handler._replace(request_streaming=True, **answers)
        return handler

    def _guarded(self, behaviour: Callable[..., Any], method: str, *, is_of_one: bool) -> Callable[..., Any]:
        """``is_of_one``: the behaviour takes one message, not a stream."""

        async def receive(requests: Any, context: Context) -> Any:  # noqa: ANN401
            if is_of_one:
                messages = self._own_messages if method.startswith(_OWN) else self._short_messages
                return await messages.only(requests, context.peer())
            if method.startswith(_REFLECTION):
                return self._short_messages.each(requests, context.peer())
            return well_formed(requests)

        # gRPC takes both kinds: handlers that yield messages, and ones that write them (health's Watch).
        guard = self._guard_stream if inspect.isasyncgenfunction(behaviour) else self._guard_unary
        return guard(behaviour, method, receive)

    def _guard_unary(
        self, behaviour: Callable[..., Awaitable[Any]], method: str, receive: Receive
    ) -> Callable[..., Awaitable[Any]]:
        async def guarded(requests: Any, context: Context) -> Any:  # noqa: ANN401
            try:
                with self._counted(context, method):
                    return await behaviour(await receive(requests, context), context)
            except Exception as error:
                failure = error
            del requests  # gRPC keeps this frame until the collector comes by
            return await self._abort(failure, context, method)

        return guarded

    def _guard_stream(
        self, behaviour: Callable[..., AsyncGenerator[Any, None]], method: str, receive: Receive
    ) -> Callable[..., AsyncGenerator[Any, None]]:
        async def guarded(requests: Any, context: Context) -> AsyncGenerator[Any, None]:  # noqa: ANN401
            received: Any = None
            try:
                with self._counted(context, method):
                    received = await receive(requests, context)
                    # Closed at once when the call is cancelled, not when the collector comes by.
                    async with contextlib.aclosing(behaviour(received, context)) as messages:
                        async for message in messages:
                            yield message
                return
            except Exception as error:
                failure = error
            finally:
                await end_stream(received)
                del received
            del requests  # gRPC keeps this frame until the collector comes by
            await self._abort(failure, context, method)

        return guarded

    def _counted(self, context: Context, method: str) -> contextlib.AbstractContextManager[None]:
        """Supervisors ask for health from hosts that may have many calls open."""
        return contextlib.nullcontext() if method == _HEALTH else self._calls.entered(context.peer())

    async def _abort(self, error: Exception, context: Context, method: str) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, grpc.aio.BaseError):
            raise asyncio.CancelledError from error  # the call has ended: there is nothing to send to
        if not isinstance(error, OutriderError):
            _log.exception("%s failed", method, exc_info=error)
        elif isinstance(error, InvalidRequestError) and method.endswith(_LINKS):
            self._warn_of_link(error, context)
        _drop_tracebacks(error)
        if not isinstance(error, OutriderError):
            error = OutriderError("an internal error; the server's log says more")
        status = rpc_status.to_status(to_status(error))
        try:
            await context.abort(status.code, status.details, status.trailing_metadata)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as gone:
            raise asyncio.CancelledError from gone
        raise error  # not reached: abort raises

    def _warn_of_link(self, error: InvalidRequestError, context: Context) -> None:
        num_suppressed = self._warnings.take()
        if num_suppressed is not None:
            _log.warning(
                "a link from %s was closed: %s",
                context.peer(),
                error,
                extra={"fields": {"num_suppressed": num_suppressed}},
            )


_GENERATIONS = (f"{_PUBLIC}Generate", f"{_PUBLIC}StreamGenerate")
_LINK_MESSAGES = {
    f"/{link_pb2.DESCRIPTOR.services_by_name[service].full_name}{_LINKS}": commands.DESCRIPTOR
    for service, commands in (("DraftService", link_pb2.DraftCommands), ("TargetService", link_pb2.TargetCommands))
}


def _deserializer(method: str, deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None
    if method in _GENERATIONS:
        return tolerant(_parse_request, _check_fields)
    if method in _LINK_MESSAGES:
        return tolerant_of_link(deserialize, _LINK_MESSAGES[method], LINK_COMMANDS)
    if method.endswith(_CHANNELS):
        return tolerant(deserialize, _check_piece)
    return tolerant(deserialize, _check_size)


def _check_fields(data: bytes) -> None:
    check_num_fields(data, generation_pb2.GenerateRequest.DESCRIPTOR)


def _parse_request(data: bytes) -> generation_pb2.GenerateRequest:
    """The request; ``InvalidRequestError`` if too much of its bytes is not part of it."""
    message = generation_pb2.GenerateRequest.FromString(data)
    if len(data) > UNUSED_BYTES.most:
        message.DiscardUnknownFields()
        UNUSED_BYTES.check("request", len(data) - message.ByteSize())
    return message


def _check_size(data: bytes) -> None:
    # Health and reflection take names, from callers without a token too, and keep them while they are watched. The
    # other methods take a hash or nothing.
    NAME_MESSAGE.check("message", len(data))


def _check_piece(data: bytes) -> None:
    CHANNEL_PIECE.check("content", len(data))


def _drop_tracebacks(error: BaseException | None) -> None:
    """Forget where an error and those behind it were raised, and those behind it: gRPC keeps the error, the frames hold
    the request, and an error of JSON holds the whole text.
    """
    while error is not None:
        behind = error.__cause__ or error.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None
        error = behind
