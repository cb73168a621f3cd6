"""The public service from its caller's side, for asyncio and for plain Python.

Values in, values and ``OutriderError`` out: nothing of gRPC is seen beyond this module. Knows no defaults and checks no
request; that is the SDK's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Generator, Iterator

import grpc
import grpc.aio

from outrider.errors import ProtocolError, RequestCancelledError
from outrider.generation import Delta, GenerationRequest, GenerationResult, ModelInfo
from outrider.transport.channels import open_blocking_channel, open_channel
from outrider.transport.convert.generation import (
    delta_from_proto,
    info_from_proto,
    last_delta,
    request_to_proto,
    result_from_proto,
)
from outrider.transport.status import translating_errors
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

INFO_TIMEOUT_S = 10.0


class _Fold:
    """Deltas out of a stream's messages; the result comes as a last delta without new output.

    No delta is held back until the next one is there: that would cost a step of latency.
    """

    def __init__(self) -> None:
        self._is_done = False

    def take(self, message: pb.StreamGenerateResponse) -> Delta:
        """The delta of one message; ``ProtocolError`` when the order is broken."""
        if self._is_done:
            raise ProtocolError("a message came after the result")
        event = message.WhichOneof("event")
        if event == "delta":
            return delta_from_proto(message.delta)
        if event != "result":
            raise ProtocolError("a message of the stream is neither delta nor result")
        self._is_done = True
        return last_delta(result_from_proto(message.result))

    def check_done(self) -> None:
        """The stream has ended; ``ProtocolError`` unless it had its result."""
        if not self._is_done:
            raise ProtocolError("the stream ended without a result")


class RemoteGeneration:
    """The public service at ``address``, for asyncio."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, request: GenerationRequest, *, timeout_s: float | None) -> GenerationResult:
        """The finished generation."""
        message = request_to_proto(request)
        with self._translating():
            response = await self._stub().Generate(message, timeout=timeout_s)
        return result_from_proto(response.result)

    async def stream(self, request: GenerationRequest, *, timeout_s: float | None) -> AsyncGenerator[Delta, None]:
        """Deltas, the last with the result; closing the generator cancels the call."""
        message, fold = request_to_proto(request), _Fold()
        call = self._stub().StreamGenerate(message, timeout=timeout_s)
        try:
            with self._translating():
                async for response in call:
                    yield fold.take(response)
            fold.check_done()
        finally:
            call.cancel()

    async def model_info(self) -> ModelInfo:
        """Facts of what is served."""
        with self._translating():
            return info_from_proto(await self._stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=INFO_TIMEOUT_S))

    async def close(self) -> None:
        """End running calls and let go of the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _stub(self) -> GenerationServiceStub:
        # Made late, and anew on another event loop, because a channel belongs to the one it was made on.
        loop = asyncio.get_running_loop()
        if self._channel is None or self._loop is not loop:
            self._channel, self._loop = open_channel(self._address), loop
        return GenerationServiceStub(self._channel)

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            with translating_errors(self._address):
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled our caller: it was the call that ended, with its channel.
            raise RequestCancelledError("the client was closed") from None


class BlockingGeneration:
    """The public service at ``address``, for plain Python; safe to use from several threads."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def generate(self, request: GenerationRequest, *, timeout_s: float | None) -> GenerationResult:
        """The finished generation."""
        message = request_to_proto(request)
        with translating_errors(self._address):
            response = self._stub().Generate(message, timeout=timeout_s)
        return result_from_proto(response.result)

    def stream(self, request: GenerationRequest, *, timeout_s: float | None) -> Generator[Delta, None, None]:
        """Deltas, the last with the result; closing the generator cancels the call."""
        message, fold = request_to_proto(request), _Fold()
        call = self._stub().StreamGenerate(message, timeout=timeout_s)
        try:
            with translating_errors(self._address):
                for response in call:
                    yield fold.take(response)
            fold.check_done()
        finally:
            call.cancel()

    def model_info(self) -> ModelInfo:
        """Facts of what is served."""
        with translating_errors(self._address):
            return info_from_proto(self._stub().GetModelInfo(pb.GetModelInfoRequest(), timeout=INFO_TIMEOUT_S))

    def close(self) -> None:
        """End running calls and let go of the connection."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _stub(self) -> GenerationServiceStub:
        with self._lock:
            if self._channel is None:
                self._channel = open_blocking_channel(self._address)
            return GenerationServiceStub(self._channel)
