"""Errors into statuses, for every handler of ours, so that handlers have no try/except."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_status import rpc_status

from outrider.errors import OutriderError
from outrider.transport.status import to_status

_log = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns our errors into their statuses, and others into INTERNAL with a log entry and no inside told."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - a handler has no public type that can be rebuilt
        """Wrap the handler that would have served the call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/outrider."):
            return handler
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=_guard_unary(handler.unary_unary, method))
        if handler.unary_stream is not None:
            return handler._replace(unary_stream=_guard_stream(handler.unary_stream, method))
        return handler._replace(stream_stream=_guard_stream(handler.stream_stream, method))


def _guard_unary(behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: ANN401
        try:
            return await behaviour(request, context)
        except Exception as error:
            failure = error
        del request  # gRPC keeps this frame until the collector comes by
        return await _abort(failure, context, method)

    return guarded


def _guard_stream(
    behaviour: Callable[..., AsyncGenerator[Any, None]], method: str
) -> Callable[..., AsyncGenerator[Any, None]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        try:
            # Closed at once when the call is cancelled, not when the collector comes by.
            async with contextlib.aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    yield message
            return
        except Exception as error:
            failure = error
        del request  # gRPC keeps this frame until the collector comes by
        await _abort(failure, context, method)

    return guarded


async def _abort(error: Exception, context: grpc.aio.ServicerContext[Any, Any], method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, OutriderError):
        _log.exception("%s failed", method, exc_info=error)
    _let_frames_go(error)
    if not isinstance(error, OutriderError):
        error = OutriderError("an internal error; the server's log says more")
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise error  # not reached: abort raises


def _let_frames_go(error: BaseException | None) -> None:
    """Forget where an error and those behind it were raised: the frames hold the request, and gRPC keeps the error."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
