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

from outrider.addresses import check_address
from outrider.cooperative import run_in_slices
from outrider.errors import ProtocolError, RequestCancelledError
from outrider.generation import Delta, GenerationRequest, GenerationResult, ModelInfo, TokenizerFiles
from outrider.transport.channels import CLIENT_OPTIONS, open_blocking_channel, open_channel
from outrider.transport.convert.generation import (
    delta_from_proto,
    first_delta,
    info_from_proto,
    last_delta,
    result_from_proto,
    started_from_proto,
    tokenizer_from_proto,
)
from outrider.transport.convert.requests import request_to_proto, request_writing
from outrider.transport.security import OPEN_CLIENT, ClientSecurity
from outrider.transport.security.files import Stamp
from outrider.transport.status import translating_errors
from outrider.transport.trace_metadata import trace_metadata
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

INFO_TIMEOUT_S = 10.0
"""Longest wait for a model's facts, which need no forward."""
MAX_BACKOFF_MS = 500
"""Longest pause between attempts to connect: callers that try again space their calls themselves."""


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
        if event == "started":
            return first_delta(started_from_proto(message.started))
        if event != "result":
            raise ProtocolError("a message of the stream is neither started, delta nor result")
        self._is_done = True
        return last_delta(result_from_proto(message.result))

    def check_done(self) -> None:
        """The stream has ended; ``ProtocolError`` unless it had its result."""
        if not self._is_done:
            raise ProtocolError("the stream ended without a result")


class RemoteGeneration:
    """The public service at ``address``, for asyncio."""

    def __init__(
        self, address: str, security: ClientSecurity = OPEN_CLIENT, *, connect_attempt_ms: int | None = None
    ) -> None:
        """``connect_attempt_ms``: how long a connection may take to come about; None: as long as to any server."""
        security.check(check_address(address))
        self._address, self._security = address, security
        self._connect_attempt_ms = connect_attempt_ms
        self._channel: grpc.aio.Channel | None = None
        self._files: Stamp = ()
        self._outdated: list[grpc.aio.Channel] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, request: GenerationRequest, *, timeout_s: float | None) -> GenerationResult:
        """The finished generation."""
        message = await run_in_slices(request_writing(request))
        with self._translating():
            response = await self._stub().Generate(
                message, timeout=timeout_s, metadata=_metadata(self._security, request)
            )
        return result_from_proto(response.result)

    async def stream(self, request: GenerationRequest, *, timeout_s: float | None) -> AsyncGenerator[Delta, None]:
        """Deltas, the last with the result; closing the generator cancels the call."""
        message, fold = await run_in_slices(request_writing(request)), _Fold()
        call = self._stub().StreamGenerate(message, timeout=timeout_s, metadata=_metadata(self._security, request))
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
            answer = await self._stub().GetModelInfo(
                pb.GetModelInfoRequest(), timeout=INFO_TIMEOUT_S, metadata=self._security.metadata()
            )
        return info_from_proto(answer)

    async def tokenizer_files(self, known_sha256: str) -> TokenizerFiles:
        """Files of the tokenizer; none when they are those that are known."""
        with self._translating():
            answer = await self._stub().GetTokenizer(
                pb.GetTokenizerRequest(known_sha256=known_sha256),
                timeout=INFO_TIMEOUT_S,
                metadata=self._security.metadata(),
            )
        return tokenizer_from_proto(answer)

    async def close(self) -> None:
        """End running calls and let go of the connection."""
        for channel in (self._channel, *self._outdated):
            if channel is not None:
                await channel.close()
        self._channel, self._outdated = None, []

    def _stub(self) -> GenerationServiceStub:
        return GenerationServiceStub(self._open_channel())

    def _open_channel(self) -> grpc.aio.Channel:
        # Made late, and anew on another event loop, because a channel belongs to the one it was made on.
        # And anew when certificates were rotated; what runs on the channel before that goes on.
        loop, files = asyncio.get_running_loop(), self._security.stamp()
        if self._channel is None or self._loop is not loop or self._files != files:
            opened = open_channel(
                self._address,
                self._security,
                connect_attempt_ms=self._connect_attempt_ms,
                max_backoff_ms=MAX_BACKOFF_MS,
                more=CLIENT_OPTIONS,
            )
            if self._channel is not None and self._loop is loop:
                self._outdated.append(self._channel)
            self._channel, self._loop, self._files = opened, loop, files
        return self._channel

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            with translating_errors(self._address, self._security):
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The caller was not cancelled: the call ended with its channel.
            raise RequestCancelledError("the client was closed") from None


class BlockingGeneration:
    """The public service at ``address``, for plain Python; safe to use from several threads."""

    def __init__(
        self, address: str, security: ClientSecurity = OPEN_CLIENT, *, connect_attempt_ms: int | None = None
    ) -> None:
        """``connect_attempt_ms``: how long a connection may take to come about; None: as long as to any server."""
        security.check(check_address(address))
        self._address, self._security = address, security
        self._connect_attempt_ms = connect_attempt_ms
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._files: Stamp = ()
        self._outdated: list[grpc.Channel] = []

    def generate(self, request: GenerationRequest, *, timeout_s: float | None) -> GenerationResult:
        """The finished generation."""
        message = request_to_proto(request)
        with translating_errors(self._address, self._security):
            response = self._stub().Generate(message, timeout=timeout_s, metadata=_metadata(self._security, request))
        return result_from_proto(response.result)

    def stream(self, request: GenerationRequest, *, timeout_s: float | None) -> Generator[Delta, None, None]:
        """Deltas, the last with the result; closing the generator cancels the call."""
        message, fold = request_to_proto(request), _Fold()
        call = self._stub().StreamGenerate(message, timeout=timeout_s, metadata=_metadata(self._security, request))
        try:
            with translating_errors(self._address, self._security):
                for response in call:
                    yield fold.take(response)
            fold.check_done()
        finally:
            call.cancel()

    def model_info(self) -> ModelInfo:
        """Facts of what is served."""
        with translating_errors(self._address, self._security):
            answer = self._stub().GetModelInfo(
                pb.GetModelInfoRequest(), timeout=INFO_TIMEOUT_S, metadata=self._security.metadata()
            )
        return info_from_proto(answer)

    def tokenizer_files(self, known_sha256: str) -> TokenizerFiles:
        """Files of the tokenizer; none when they are those that are known."""
        with translating_errors(self._address, self._security):
            answer = self._stub().GetTokenizer(
                pb.GetTokenizerRequest(known_sha256=known_sha256),
                timeout=INFO_TIMEOUT_S,
                metadata=self._security.metadata(),
            )
        return tokenizer_from_proto(answer)

    def close(self) -> None:
        """End running calls and let go of the connection."""
        with self._lock:
            for channel in (self._channel, *self._outdated):
                if channel is not None:
                    channel.close()
            self._channel, self._outdated = None, []

    def _stub(self) -> GenerationServiceStub:
        with self._lock:
            files = self._security.stamp()
            if self._channel is None or self._files != files:
                opened = open_blocking_channel(
                    self._address,
                    self._security,
                    connect_attempt_ms=self._connect_attempt_ms,
                    max_backoff_ms=MAX_BACKOFF_MS,
                    more=CLIENT_OPTIONS,
                )
                if self._channel is not None:
                    self._outdated.append(self._channel)
                self._channel, self._files = opened, files
            return GenerationServiceStub(self._channel)


def _metadata(security: ClientSecurity, request: GenerationRequest) -> tuple[tuple[str, str], ...]:
    """Metadata of the caller's identity and trace."""
    return (*security.metadata(), *trace_metadata(request))
