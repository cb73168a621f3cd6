"""gRPC servicers of the ports and of the public service: conversion around plain values.

Handlers have no try/except: ``outrider.transport.server`` turns errors into statuses. A stream is read and written
independently, and its in-process link is closed however it ends.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from outrider.cooperative import run_in_slices
from outrider.errors import ProtocolError, UnavailableError
from outrider.generation import Delta, GenerationRequest, ModelInfo, TokenizerFiles
from outrider.limits import ANY_MODEL, ModelLimits
from outrider.open_requests import DEFAULT_MAX_BYTES, HeldBytes, OpenRequests
from outrider.packed_ids import reading_long
from outrider.ports import Draft, Link, Target
from outrider.telemetry.logs import about_request
from outrider.transport.arrivals import Arrivals
from outrider.transport.channel_streams import carry_channel
from outrider.transport.channels import MAX_LINK_MESSAGE_BYTES
from outrider.transport.convert.commands import draft_commands_from_proto, target_commands_from_proto
from outrider.transport.convert.describing import description_to_proto
from outrider.transport.convert.events import draft_events_to_proto, target_events_to_proto
from outrider.transport.convert.generation import (
    delta_to_proto,
    info_to_proto,
    result_to_proto,
    started_to_proto,
    tokenizer_to_proto,
)
from outrider.transport.convert.requests import request_reading
from outrider.transport.link.counts import LinkCounts
from outrider.transport.link.heartbeats import (
    DEFAULT_COORDINATOR_TIMEOUT_S,
    UNANNOUNCED_TIMEOUT_S,
    sends_heartbeats,
    with_heartbeats,
)
from outrider.transport.link.pump import LinkPump
from outrider.transport.link.versions import check_coordinator
from outrider.transport.security.tokens import TokenFile, bearer_token
from outrider.transport.tokenizer_answers import TokenizerAnswers
from outrider.transport.trace_metadata import log_fields, with_trace
from outrider.types import ModelDescription
from outrider.v1 import generation_pb2, link_pb2
from outrider.v1.channel_pb2 import ChannelBytes
from outrider.v1.generation_pb2_grpc import GenerationServiceServicer
from outrider.v1.link_pb2_grpc import DraftServiceServicer, TargetServiceServicer

_MAX_UINT32 = (1 << 32) - 1

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[generation_pb2.GenerateRequest]


class Generator(Protocol):
    """Implementation of the public service."""

    def generate_stream(
        self, request: GenerationRequest, *, deadline_s: float | None, on_taken_in: Callable[[], None]
    ) -> AsyncGenerator[Delta, None]:
        """Yield deltas, the last with the result; closing it cancels. ``deadline_s``: seconds left, None without a
        limit. ``on_taken_in`` is called when the request is tokenized: nothing of it is held any more.
        """
        ...

    async def model_info(self) -> ModelInfo:
        """Return facts about the served models."""
        ...

    def tokenizer_files(self) -> TokenizerFiles:
        """Return the files of the tokenizer and the chat templates in use."""
        ...

    @property
    def limits(self) -> ModelLimits:
        """Return the limits of the served model."""
        ...


class _PortServicer:
    """Base of the servicers of both ports: all but the messages of their links."""

    _decode: Callable[..., Any]
    _encode: Callable[..., Any]
    _events: type[Any]

    def __init__(
        self,
        port: Draft | Target,
        *,
        max_message_bytes: int = MAX_LINK_MESSAGE_BYTES,
        link_timeout_s: float = DEFAULT_COORDINATOR_TIMEOUT_S,
    ) -> None:
        """``link_timeout_s``: the silence after which a coordinator that sends heartbeats is gone."""
        self._port = port
        self._links = LinkCounts()
        self._max_message_bytes = max_message_bytes
        self._link_timeout_s = link_timeout_s

    async def Describe(self, request: link_pb2.DescribeRequest, context: Context) -> link_pb2.ModelDescription:
        """Return the description of the service."""
        return description_to_proto(with_heartbeats(await self._port.describe()))

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any, None]:
        """Serve one link."""
        check_coordinator(context.invocation_metadata())
        limits = _limits_of(await self._port.describe())
        with self._links.entered(context.peer()):
            link: Link[Any, Any] = await self._port.attach()
            pump = LinkPump(
                link,
                partial(self._decode, model=limits),
                self._encode,
                max_message_bytes=self._max_message_bytes,
                beat=lambda received: context.write(self._events(heartbeat=_heartbeat(received, link))),
                silence_timeout_s=silence_timeout_s(context, self._link_timeout_s),
            )
            async with contextlib.aclosing(pump.run(request_iterator)) as messages:
                async for message in messages:
                    yield message


class DraftServicer(_PortServicer, DraftServiceServicer):
    """Serves a draft."""

    _decode = staticmethod(draft_commands_from_proto)
    _encode = staticmethod(draft_events_to_proto)
    _events = link_pb2.DraftEvents


class TargetServicer(_PortServicer, TargetServiceServicer):
    """Serves a target."""

    _decode = staticmethod(target_commands_from_proto)
    _encode = staticmethod(target_events_to_proto)
    _events = link_pb2.TargetEvents

    def __init__(
        self,
        port: Target,
        *,
        admit_channel: Callable[[socket.socket], None] | None = None,
        max_message_bytes: int = MAX_LINK_MESSAGE_BYTES,
        link_timeout_s: float = DEFAULT_COORDINATOR_TIMEOUT_S,
    ) -> None:
        """``admit_channel`` serves the socket of a proposal channel from another host; None: there are none."""
        super().__init__(port, max_message_bytes=max_message_bytes, link_timeout_s=link_timeout_s)
        self._admit_channel = admit_channel
        self._channels = LinkCounts(what="proposal channels")

    async def OpenChannel(
        self, request_iterator: AsyncIterator[ChannelBytes], context: Context
    ) -> AsyncGenerator[ChannelBytes, None]:
        """Carry one proposal channel."""
        if self._admit_channel is None:
            raise UnavailableError("this target has no proposal channels")
        with self._channels.entered(context.peer()):
            async with contextlib.aclosing(carry_channel(request_iterator, self._admit_channel)) as pieces:
                async for piece in pieces:
                    yield piece


class GenerationServicer(GenerationServiceServicer):
    """Servicer of the public service. To gRPC its requests for generations are streams of one message, which are the
    same on the wire: of a handler that takes a message, gRPC keeps that message and its bytes until the call ends.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        max_open_request_bytes: int = DEFAULT_MAX_BYTES,
        tokens: TokenFile | None = None,
    ) -> None:
        """``max_open_request_bytes``: of requests that are being read and tokenized. ``tokens``: those of the callers,
        from which requests get a cache salt.
        """
        self._generator, self._tokens = generator, tokens
        self._tokenizers = TokenizerAnswers()
        self._open_requests, self._arrivals = OpenRequests(max_open_request_bytes), Arrivals()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods."""
        service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
        makers = {
            "Generate": grpc.stream_unary_rpc_method_handler,
            "StreamGenerate": grpc.stream_stream_rpc_method_handler,
        }
        handlers = {
            method.name: makers.get(method.name, grpc.unary_unary_rpc_method_handler)(
                getattr(self, method.name),
                getattr(generation_pb2, method.input_type.name).FromString,
                getattr(generation_pb2, method.output_type.name).SerializeToString,
            )
            for method in service.methods
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))

    async def Generate(self, requests: Requests, context: Context) -> generation_pb2.GenerateResponse:
        """Fold the stream into its result."""
        async with self._deltas(requests, context) as deltas:
            async for delta in deltas:
                if delta.result is not None:
                    return generation_pb2.GenerateResponse(result=result_to_proto(delta.result))
        raise ProtocolError("the generation ended without a result")

    async def StreamGenerate(
        self, requests: Requests, context: Context
    ) -> AsyncIterator[generation_pb2.StreamGenerateResponse]:
        """Send deltas, then exactly one result; a resumable stream begins with ``Started``."""
        async with self._deltas(requests, context) as deltas:
            async for delta in deltas:
                if delta.started is not None:
                    yield started_to_proto(delta.started)
                if delta.text or delta.token_ids:
                    yield delta_to_proto(delta)
                if delta.result is not None:
                    yield generation_pb2.StreamGenerateResponse(result=result_to_proto(delta.result))

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        """Return facts about the served models."""
        return info_to_proto(await self._generator.model_info())

    async def GetTokenizer(
        self, request: generation_pb2.GetTokenizerRequest, context: Context
    ) -> generation_pb2.GetTokenizerResponse:
        """Return the files of the tokenizer; without contents if the caller has them."""
        found = self._generator.tokenizer_files()
        if found.sha256 == request.known_sha256:
            return tokenizer_to_proto(replace(found, files={}))
        await self._tokenizers.take_turn(context)
        return tokenizer_to_proto(found)

    @contextlib.asynccontextmanager
    async def _deltas(self, requests: Requests, context: Context) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """The generation; closed, and so cancelled, when the call ends for any reason. The request is not held here
        while it runs.
        """
        with self._open_requests.entered() as held:
            asked = with_trace(await self._read(requests, held, context.peer()), context.invocation_metadata())
            asked = self._with_cache_salt(asked, context)
            about_request.set(log_fields(asked))  # of this call: every call has a context of its own
            deadline = context.time_remaining()  # now: the call may have waited to be read
            generation = self._generator.generate_stream(asked, deadline_s=deadline, on_taken_in=held.release)
            del asked
            async with contextlib.aclosing(generation) as deltas:
                yield deltas

    def _with_cache_salt(self, request: GenerationRequest, context: Context) -> GenerationRequest:
        """The request with the cache salt of its caller's token, unless it has one."""
        token = bearer_token(context.invocation_metadata())
        if self._tokens is None or token is None or request.cache_salt:
            return request
        return replace(request, cache_salt=self._tokens.cache_salt(token))

    async def _read(self, requests: Requests, held: HeldBytes, peer: str) -> GenerationRequest:
        limits, request = self._generator.limits, await self._arrivals.receive(requests, held, peer)
        return await run_in_slices(request_reading(request, limits, read_prompt=reading_long))


def silence_timeout_s(context: Context, timeout_s: float) -> float:
    """Seconds of silence after which the caller is gone."""
    return timeout_s if sends_heartbeats(context.invocation_metadata()) else max(timeout_s, UNANNOUNCED_TIMEOUT_S)


def _heartbeat(num_received: int, link: Link[Any, Any]) -> link_pb2.Heartbeat:
    stall = link.stall
    return link_pb2.Heartbeat(
        num_received_messages=num_received,
        num_pages_free=link.num_pages_free,
        stall_ms=_milliseconds(stall.age_s),
        stall_limit_ms=_milliseconds(stall.limit_s),
    )


def _milliseconds(seconds: float) -> int:
    return min(round(1000 * seconds), _MAX_UINT32)


def _limits_of(description: ModelDescription) -> ModelLimits:
    """Bounds of a session's tokens; a service without a model takes any token."""
    return replace(ANY_MODEL, num_token_ids=description.vocab_size or ANY_MODEL.num_token_ids)
