"""The endpoints: from a request body to a response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider import __version__
from outrider.cooperative import run_in_slices
from outrider.errors import InvalidRequestError, OutriderError, UnauthenticatedError
from outrider.gateway.bodies import held_bytes, read_json, until_disconnect
from outrider.gateway.chats import ChatGeneration, plan_chat
from outrider.gateway.generations import GenerationChoice, GenerationClient, generate_all, stream_all
from outrider.gateway.middleware import CACHE_SALT, note_misspelled, request_name
from outrider.gateway.options import Caller, Wanted, make_choices
from outrider.gateway.prompts import PreparedPrompt, check_length, prepare_chat, prepare_prompt
from outrider.gateway.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
    parsing,
)
from outrider.gateway.protocol.fields import GenerationFields
from outrider.gateway.protocol.parsing import RequestT
from outrider.gateway.responses.api_response import ApiResponse, encode_json, event_stream
from outrider.gateway.responses.chats import ChatResponse
from outrider.gateway.responses.completions import CompletionResponse
from outrider.gateway.responses.response_objects import ResponseObject
from outrider.gateway.served_model import ModelSource, ModelWatch, ServedModel
from outrider.gateway.watching import TRACE
from outrider.limits import RateLimit
from outrider.open_requests import DEFAULT_MAX_BYTES, OpenRequests
from outrider.telemetry.tracing.context import TraceContext
from outrider.tokenization.output_parsing import UNNAMED, OutputFormat

_log = logging.getLogger(__name__)
_LINE_INTERVAL_S = 10.0
"""Interval of log lines about misspelled fields, so that clients cannot fill the log."""
Json = dict[str, Any]
_BYTES_OF_ID = 4
"""Bytes of a prompt's id in a message, with the largest vocabularies."""


class GatewayClient(GenerationClient, ModelSource, Protocol):
    """The part of ``AsyncClient`` that the endpoints use."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits and timeouts of the gateway."""

    max_body_bytes: int = 8 << 20
    resume_timeout_s: float = 0.0
    """Longest wait of an interrupted generation for a coordinator; 0: an interruption is an error."""
    max_open_request_bytes: int = DEFAULT_MAX_BYTES
    """Bound on the bytes of requests whose prompts are being made, and of the prompts while they are answered."""


class JsonAnswer(JSONResponse):
    """JSON response in UTF-8."""

    def render(self, content: Any) -> bytes:  # noqa: ANN401 - JSON
        """Encode the body."""
        return encode_json(content)


class Endpoints:
    """The endpoints of one gateway."""

    def __init__(
        self,
        client: GatewayClient,
        watch: ModelWatch,
        limits: GatewayLimits = GatewayLimits(),
        parsers: OutputFormat = UNNAMED,
    ) -> None:
        """``parsers``: names that go before the ones that the chat template suggests."""
        self._client, self._watch, self._limits, self._parsers = client, watch, limits, parsers
        self.open_requests = OpenRequests(limits.max_open_request_bytes)
        self._misspelled_lines = RateLimit(_LINE_INTERVAL_S)
        self.is_draining = False
        """Health says no then, so that load balancers send nothing more."""

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        asked = await self._parsed(request, CompletionRequest)
        model = await self._watch.current()
        model.check_name(asked.model)
        prompts = await until_disconnect(request, _prepare_prompts(model, asked))
        caller = _caller(request, "cmpl-", asked.request_id)
        # A prompt that is only echoed is computed by generating one token, which is not returned.
        wanted_tokens = 1 if asked.is_echo_alone else asked.wanted_tokens
        wanted = self._wanted(wanted_tokens, asked.logprobs, asked.wanted_prompt_logprobs)
        choices = make_choices(asked, prompts, replace(wanted, grammar=asked.grammar), caller)
        answer, streams = CompletionResponse(asked, model, prompts, choices, caller.request_id), bool(asked.stream)
        _keep_prompts(request, prompts)
        del asked  # its prompts are megabytes as texts, and its answer takes minutes
        return await self._answer(request, answer, choices, streams=streams)

    async def chat_completions(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        asked = await self._parsed(request, ChatCompletionRequest)
        model = await self._watch.current()
        model.check_name(asked.model)
        chat = await self._plan_chat(request, model, asked, "chatcmpl-")
        answer, streams = ChatResponse(asked, model, chat), bool(asked.stream)
        del asked  # a chat is megabytes, and its answer takes minutes
        return await self._answer(request, answer, chat.choices, streams=streams)

    async def responses(self, request: Request) -> Response:
        """``POST /v1/responses``."""
        asked = await self._parsed(request, ResponsesRequest)
        model = await self._watch.current()
        model.check_name(asked.model)
        conversation = Conversation("" if asked.input is None else asked.input, asked.instructions)
        try:
            as_chat = asked.as_chat(conversation)
            as_chat.check()
            chat = await self._plan_chat(request, model, as_chat, "resp_")
        except OutriderError as error:
            raise conversation.translated(error) from error
        conversation.messages.clear()
        answer, streams = ResponseObject(asked, model, chat, conversation), bool(asked.stream)
        del asked, as_chat
        return await self._answer(request, answer, chat.choices, streams=streams)

    async def stored_response(self, request: Request) -> Response:
        """``/v1/responses/{id}``: 404, since nothing is stored."""
        raise HTTPException(
            HTTPStatus.NOT_FOUND, "responses are not stored: send the whole conversation as input each time"
        )

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        model = await self._watch.current()
        return JsonAnswer({"object": "list", "data": [_card(model, name) for name in model.names]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{name}``."""
        model, name = await self._watch.current(), request.path_params["name"]
        if name not in model.names:
            raise model.not_found(name)
        return JsonAnswer(_card(model, name))

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: the ids of a text, or of messages."""
        asked = await self._parsed(request, TokenizeRequest)
        model = await self._watch.current()
        model.check_name(asked.model)
        if asked.is_chat:
            prompt = await prepare_chat(model, asked, asked.chat)
        else:
            if asked.prompt is None:
                raise InvalidRequestError("prompt", "must be given, or messages")
            prompt = await prepare_prompt(model, asked, asked.prompt, needs_text=False)
        found: Json = {
            "count": len(prompt.token_ids),
            "max_model_len": model.info.max_model_len,
            "tokens": list(prompt.token_ids),
            "token_strs": None,
        }
        if asked.return_token_strs:
            found["token_strs"] = [model.token_text(token_id).text for token_id in prompt.token_ids]
        return JsonAnswer(found)

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``: the text of ids, special tokens included."""
        asked = await self._parsed(request, DetokenizeRequest)
        model = await self._watch.current()
        model.check_name(asked.model)
        tokenizer = model.require_tokenizer("tokens")
        model.check_ids("tokens", asked.tokens)
        return JsonAnswer({"prompt": tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    async def health(self, request: Request) -> Response:
        """``GET /health`` and ``/ping``: 200 while a coordinator with a target answers, otherwise 503."""
        if self.is_draining:
            return Response(status_code=503)
        try:
            await self._watch.ask()
        except UnauthenticatedError:
            pass  # a coordinator answers, and probes bring no key
        except OutriderError:
            return Response(status_code=503)
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        """``GET /version``."""
        return JsonAnswer({"version": __version__})

    async def _parsed(self, request: Request, kind: type[RequestT]) -> RequestT:
        body = await read_json(request, max_bytes=self._limits.max_body_bytes)
        asked = await run_in_slices(parsing(kind, body))
        if isinstance(asked, GenerationFields) and asked.misspelled:
            misspelled = note_misspelled(request.state, asked.misspelled)
            if self._misspelled_lines.take() is not None:
                _log.warning("a request has fields that are ignored: %s", misspelled)
        return asked

    def _wanted(self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> Wanted:
        return Wanted(max_tokens, logprobs, prompt_logprobs, self._limits.resume_timeout_s)

    async def _plan_chat(
        self, request: Request, model: ServedModel, asked: ChatCompletionRequest, prefix: str
    ) -> ChatGeneration:
        prompt = await until_disconnect(request, prepare_chat(model, asked, asked.chat))
        caller = _caller(request, prefix, asked.request_id)
        _keep_prompts(request, [prompt])
        timeout = self._limits.resume_timeout_s
        return plan_chat(model, asked, prompt, caller, parsers=self._parsers, resume_timeout=timeout)

    async def _answer(
        self, request: Request, answer: ApiResponse, choices: Sequence[GenerationChoice], *, streams: bool
    ) -> Response:
        try:
            if not streams:
                results = await until_disconnect(request, generate_all(self._client, choices))
                return JsonAnswer(answer.whole(results))
            # Until there is output, an error still is an answer with a status of its own.
            deltas = stream_all(self._client, choices)
            first = await until_disconnect(request, _first_of(deltas))
        except OutriderError as error:
            raise answer.translated(error) from error
        return StreamingResponse(
            event_stream(answer, deltas, first),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )


async def _prepare_prompts(model: ServedModel, asked: CompletionRequest) -> list[PreparedPrompt]:
    prompts = []
    for given in asked.prompts:
        prompts.append(await prepare_prompt(model, asked, given, needs_text=bool(asked.echo)))
        await asyncio.sleep(0)  # a thousand short prompts would hold up the streams of others
    for prompt in prompts:
        wanted = None if asked.is_echo_alone else asked.wanted_tokens
        check_length(model, prompt, wanted, prompt_field="prompt", tokens_field="max_tokens")
    return prompts


def _keep_prompts(request: Request, prompts: Sequence[PreparedPrompt]) -> None:
    """Drop all of a request but its prompts."""
    num_ids = sum(len(prompt.token_ids) for prompt in prompts)
    held_bytes(request).keep(_BYTES_OF_ID * num_ids + sum(len(prompt.text) for prompt in prompts))


async def _first_of(deltas: Any) -> Any:  # noqa: ANN401 - an async generator's next value
    """The first delta; None of a stream without any. A stream that gives none is closed."""
    try:
        return await anext(deltas, None)
    except BaseException:
        await deltas.aclose()
        raise


def _caller(request: Request, prefix: str, wanted_id: str | None) -> Caller:
    name = request_name(request.state, wanted_id)
    salt: str = getattr(request.state, CACHE_SALT, "")
    own: TraceContext | None = getattr(request.state, TRACE, None)
    if own is not None:
        return Caller(f"{prefix}{name}", own.trace_parent, own.state or None, salt)
    trace_parent = request.headers.get("traceparent")
    if trace_parent is None or TraceContext.parse(trace_parent) is None:
        return Caller(f"{prefix}{name}", cache_salt=salt)
    return Caller(f"{prefix}{name}", trace_parent, request.headers.get("tracestate"), salt)


def _card(model: ServedModel, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "outrider",
        "root": model.info.target_model,
        "parent": None,
        "max_model_len": model.info.max_model_len,
        "permission": [],
    }
