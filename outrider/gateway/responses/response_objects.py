"""Responses of ``/v1/responses``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from outrider.errors import InvalidRequestError, OutriderError
from outrider.gateway.chats import ChatGeneration
from outrider.gateway.generations import GenerationChoice
from outrider.gateway.protocol.response_input import Conversation
from outrider.gateway.protocol.responses import ResponsesRequest
from outrider.gateway.responses.api_response import ApiResponse, Json, encode_json
from outrider.gateway.responses.error_responses import error_body, in_words_of_chats
from outrider.gateway.responses.logprobs import LogprobWriter
from outrider.gateway.responses.response_items import OutputItems
from outrider.gateway.responses.usage import total_usage
from outrider.gateway.served_model import ServedModel
from outrider.generation import Delta, GenerationResult
from outrider.types import FinishReason, TokenLogprob

_RETURNED = (
    *("instructions", "max_output_tokens", "metadata", "reasoning", "temperature", "top_logprobs", "top_p", "user"),
)
"""Fields of the request that the response has too."""


class ResponseObject(ApiResponse):
    """The response to one request."""

    ending = b""

    def __init__(
        self, request: ResponsesRequest, model: ServedModel, chat: ChatGeneration, conversation: Conversation
    ) -> None:
        self._request, self._choices, self._grammar = request.without_input(), chat.choices, chat.grammar
        self._conversation = conversation
        self._logprobs = LogprobWriter(model, writes_ids=bool(request.return_tokens_as_token_ids))
        parser = chat.form.make_parser()
        if parser is not None and request.includes_logprobs:
            problem = "is not supported where reasoning or calls are split off the output"
            raise InvalidRequestError("top_logprobs" if request.top_logprobs else "include", problem)
        self._output = OutputItems(parser, make_call_id=chat.form.make_call_id, max_calls=chat.form.max_calls)
        self._result: GenerationResult | None = None
        self._num_events = 0
        self._head: Json = {
            "id": chat.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model.check_name(request.model),
            **{name: getattr(request, name) for name in _RETURNED},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": {"format": request.format},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
        }

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """The whole response."""
        for _ in self._events(results[0].text, results[0].logprobs, results[0]):
            pass
        return self._response(self._status, results[0])

    def events(self, choice: GenerationChoice, delta: Delta) -> Iterator[Json]:
        """The events of a delta, the first two before its own."""
        if not self._num_events:
            for kind in ("created", "in_progress"):
                yield self._numbered({"type": f"response.{kind}", "response": self._response("in_progress")})
        for event in self._events(delta.text, delta.logprobs, delta.result):
            yield self._numbered(event)

    def last_events(self) -> Iterator[Json]:
        """The whole response."""
        response = self._response(self._status, self._result)
        yield self._numbered({"type": f"response.{self._status}", "response": response})

    def failure(self, error: Exception) -> Json:
        """The event of an error."""
        body = error_body(self.translated(error) if isinstance(error, OutriderError) else error)["error"]
        code = "rate_limit_exceeded" if body["code"] == 429 else "server_error"
        response = {**self._response("failed"), "error": {"code": code, "message": body["message"]}}
        return self._numbered({"type": "response.failed", "response": response})

    def translated(self, error: OutriderError) -> OutriderError:
        """An error with the field names of the request."""
        return self._conversation.translated(in_words_of_chats(error, self._grammar))

    def encode(self, events: Iterable[Json]) -> bytes:
        """Server-sent events that have their types as names, too."""
        return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event)) for event in events)

    @property
    def _status(self) -> str:
        is_cut = self._result is not None and self._result.finish_reason is FinishReason.LENGTH
        return "incomplete" if is_cut else "completed"

    def _events(
        self, text: str, logprobs: Sequence[TokenLogprob] | None, result: GenerationResult | None
    ) -> Iterator[Json]:
        yield from self._output.push(text, self._written(logprobs))
        if result is not None:
            self._result = result
            yield from self._output.finish(self._status)

    def _written(self, logprobs: Sequence[TokenLogprob] | None) -> list[Json]:
        if not logprobs or not self._request.includes_logprobs:
            return []
        found: list[Json] = self._logprobs.chat(logprobs, self._request.top_logprobs or 0)["content"]
        return found

    def _numbered(self, event: Json) -> Json:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _response(self, status: str, result: GenerationResult | None = None) -> Json:
        is_cut = status == "incomplete"
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items,
            "usage": None if result is None else self._usage(result),
        }

    def _usage(self, result: GenerationResult) -> Json:
        found = total_usage(self._choices, [result])
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **found["completion_tokens_details"]},
            "total_tokens": found["total_tokens"],
        }
