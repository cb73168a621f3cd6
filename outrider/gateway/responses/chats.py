"""Responses of ``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from outrider.errors import OutriderError
from outrider.gateway.chats import ChatGeneration
from outrider.gateway.generations import GenerationChoice
from outrider.gateway.protocol.chat import ChatCompletionRequest
from outrider.gateway.responses.api_response import ApiResponse, Json
from outrider.gateway.responses.chat_messages import MessageParser
from outrider.gateway.responses.choice_state import ChoiceStates
from outrider.gateway.responses.error_responses import in_words_of_chats
from outrider.gateway.responses.logprobs import LogprobWriter
from outrider.gateway.responses.usage import total_usage
from outrider.gateway.served_model import ServedModel
from outrider.generation import Delta, GenerationResult
from outrider.types import FinishReason, TokenLogprob


class ChatResponse(ApiResponse):
    """The response to one request."""

    def __init__(self, request: ChatCompletionRequest, model: ServedModel, chat: ChatGeneration) -> None:
        self._request, self._prompt, self._choices = request.without_input(), chat.prompt, chat.choices
        self._states = ChoiceStates(chat.choices, [len(chat.prompt.token_ids)], model)
        self._logprobs = LogprobWriter(model, writes_ids=bool(request.return_tokens_as_token_ids))
        self._messages = [MessageParser(chat.form) for _ in chat.choices]
        self._grammar = chat.grammar
        self._role, self._echoed = request.role, request.echoed
        self._head = {
            "id": chat.request_id,
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.check_name(request.model),
        }

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """The whole response."""
        found: Json = {
            **self._head,
            "choices": [self._choice(choice, result) for choice, result in zip(self._choices, results, strict=True)],
            "system_fingerprint": None,
            "usage": total_usage(self._choices, results),
        }
        if self._request.return_token_ids:
            found["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._request.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._logprobs.prompt(results[0].prompt_logprobs or ())
        return found

    def events(self, choice: GenerationChoice, delta: Delta) -> Iterator[Json]:
        """The role before the first delta of a choice, then a chunk for each delta."""
        state = self._states.take(choice, delta)
        if state.is_first:
            yield self._first_chunk(choice)
        parser = self._messages[choice.index]
        message = parser.push(delta.text, is_last=delta.result is not None)
        if not (message or delta.result or self._request.return_token_ids or delta.logprobs):
            return
        found: Json = {
            "index": choice.index,
            "delta": message,
            "logprobs": self._some_logprobs(delta.logprobs) if delta.token_ids else None,
            "finish_reason": None,
        }
        if self._request.return_token_ids:
            found["token_ids"] = list(delta.token_ids)
        if delta.result is not None:
            found |= self._ending(choice, delta.result)
        yield self._chunk(choice, found)

    def last_events(self) -> Iterator[Json]:
        """The usage, if requested."""
        if self._request.includes_usage:
            yield {**self._head, "choices": [], "usage": total_usage(self._choices, self._states.results)}

    def translated(self, error: OutriderError) -> OutriderError:
        """An error with the field names of the request."""
        return in_words_of_chats(error, self._grammar)

    def _first_chunk(self, choice: GenerationChoice) -> Json:
        message = {"role": self._role, "content": self._echoed}
        found = self._chunk(choice, {"index": choice.index, "delta": message, "logprobs": None, "finish_reason": None})
        return found | {"prompt_token_ids": list(self._prompt.token_ids)} if self._request.return_token_ids else found

    def _chunk(self, choice: GenerationChoice, found: Json) -> Json:
        usage = {"usage": self._states.usage(choice)} if self._request.tells_usage_always else {}
        return {**self._head, "choices": [found], **usage}

    def _choice(self, choice: GenerationChoice, result: GenerationResult) -> Json:
        message = self._messages[choice.index].whole(result.text)
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        found: Json = {
            "index": choice.index,
            "message": {"role": self._role, "refusal": None, **message},
            "logprobs": self._some_logprobs(result.logprobs),
            **self._ending(choice, result),
        }
        return found | {"token_ids": list(result.token_ids)} if self._request.return_token_ids else found

    def _ending(self, choice: GenerationChoice, result: GenerationResult) -> Json:
        ending = self._states.ending(choice, result)
        message = self._messages[choice.index]
        is_call = message.has_calls and result.finish_reason is FinishReason.STOP
        if is_call and isinstance(result.matched_stop, str):
            is_call = not message.is_in_call
        return {**ending, "finish_reason": "tool_calls"} if is_call else ending

    def _some_logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> Json | None:
        wanted = self._request.wanted_logprobs
        return None if wanted is None or logprobs is None else self._logprobs.chat(logprobs, wanted)
