"""Responses of ``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from outrider.errors import OutriderError
from outrider.gateway.generations import GenerationChoice
from outrider.gateway.prompts import PreparedPrompt
from outrider.gateway.protocol.completion import CompletionRequest
from outrider.gateway.responses.api_response import ApiResponse, Json
from outrider.gateway.responses.choice_state import ChoiceStates
from outrider.gateway.responses.error_responses import in_words_of_prompts
from outrider.gateway.responses.logprobs import LogprobWriter
from outrider.gateway.responses.usage import total_usage
from outrider.gateway.served_model import ServedModel
from outrider.generation import Delta, GenerationResult
from outrider.types import TokenLogprob


class CompletionResponse(ApiResponse):
    """The response to one request."""

    def __init__(
        self,
        request: CompletionRequest,
        model: ServedModel,
        prompts: Sequence[PreparedPrompt],
        choices: Sequence[GenerationChoice],
        answer_id: str,
    ) -> None:
        self._request, self._model = request.without_input(), model
        self._prompts, self._choices = prompts, choices
        self._states = ChoiceStates(choices, [len(prompt.token_ids) for prompt in prompts], model)
        self._logprobs = LogprobWriter(model, writes_ids=bool(request.return_tokens_as_token_ids))
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.check_name(request.model),
        }

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """The whole response."""
        return {
            **self._head,
            "choices": [self._choice(choice, result) for choice, result in zip(self._choices, results, strict=True)],
            "system_fingerprint": None,
            "usage": total_usage(self._choices, results, counts_output=not self._request.is_echo_alone),
        }

    def events(self, choice: GenerationChoice, delta: Delta) -> Iterator[Json]:
        """One chunk for a delta. With ``echo`` and logprobs, a choice is sent at its end, because the prompt's logprobs
        come with the result.
        """
        state = self._states.take(choice, delta)
        if self._echoes_logprobs or self._request.is_echo_alone:
            if delta.result is not None:
                yield self._chunk(choice, self._choice(choice, delta.result), state.num_tokens)
            return
        text = self._echo(choice) + delta.text if state.is_first else delta.text
        if not (text or delta.result or self._request.return_token_ids or delta.logprobs):
            return
        found: Json = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if delta.logprobs and self._request.logprobs is not None:
            found["logprobs"] = self._logprobs.completion(delta.token_ids, delta.logprobs, text_offset=state.offset)
        if self._request.return_token_ids:
            found |= self._ids(choice, delta.token_ids, with_prompt=state.is_first)
        if delta.result is not None:
            found |= self._states.ending(choice, delta.result)
        yield self._chunk(choice, found, state.num_tokens)

    def last_events(self) -> Iterator[Json]:
        """The usage, if requested."""
        if self._request.includes_usage:
            usage = total_usage(self._choices, self._states.results, counts_output=not self._request.is_echo_alone)
            yield {**self._head, "choices": [], "usage": usage}

    def translated(self, error: OutriderError) -> OutriderError:
        """An error with the field names of the request."""
        return in_words_of_prompts(error, self._request.grammar)

    @property
    def _echoes_logprobs(self) -> bool:
        return bool(self._request.echo) and self._request.logprobs is not None

    def _chunk(self, choice: GenerationChoice, found: Json, num_tokens: int) -> Json:
        usage = {"usage": self._states.usage(choice)} if self._request.tells_usage_always else {}
        return {**self._head, "choices": [found], **usage}

    def _choice(self, choice: GenerationChoice, result: GenerationResult) -> Json:
        is_echo_alone = self._request.is_echo_alone
        found: Json = {
            "index": choice.index,
            "text": self._echo(choice) + ("" if is_echo_alone else result.text),
            "logprobs": self._all_logprobs(choice, result),
            **self._states.ending(choice, result),
        }
        if is_echo_alone:
            found |= {"finish_reason": "length", "stop_reason": None}
        if self._request.return_token_ids:
            found |= self._ids(choice, () if is_echo_alone else result.token_ids, with_prompt=True)
        if self._request.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._logprobs.prompt(result.prompt_logprobs or ())
        return found

    def _echo(self, choice: GenerationChoice) -> str:
        return self._prompts[choice.prompt].text if self._request.echo else ""

    def _ids(self, choice: GenerationChoice, token_ids: Sequence[int], *, with_prompt: bool) -> Json:
        prompt = list(self._prompts[choice.prompt].token_ids) if with_prompt else None
        return {"prompt_token_ids": prompt, "token_ids": list(token_ids)}

    def _all_logprobs(self, choice: GenerationChoice, result: GenerationResult) -> Json | None:
        if self._request.logprobs is None:
            return None
        token_ids: tuple[int, ...] = () if self._request.is_echo_alone else result.token_ids
        logprobs: tuple[TokenLogprob | None, ...] = (result.logprobs or ())[: len(token_ids)]
        if self._request.echo:
            token_ids = self._prompts[choice.prompt].token_ids + token_ids
            logprobs = (result.prompt_logprobs or ()) + logprobs
        return self._logprobs.completion(token_ids, logprobs, text_offset=0)
