"""What a request may say: one set of checks for the SDK and the coordinator.

``check_request`` needs nothing but the request; ``check_against_model`` needs the facts of a model and is the
coordinator's. Each raises ``InvalidRequestError`` naming the field and saying what would be right. Knows no transport.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from outrider.errors import InvalidRequestError
from outrider.generation import GenerationRequest
from outrider.types import SamplingParams

MAX_SEED = (1 << 64) - 1
MAX_TOKENS = (1 << 31) - 1
MAX_LOGPROBS = 1024
"""Likeliest tokens that may be asked for at each position."""
MAX_DRAFT_LENGTH = 64
"""Draft tokens in one proposal; scoring more in one pass never pays."""
MAX_STOPS = 64
MAX_PROMPT_CHARACTERS = 2_000_000
"""Longer than any model's context, shorter than what a message may hold."""
MAX_PROMPT_TOKENS = 1_000_000
MAX_REQUEST_ID = 256


def check_request(request: GenerationRequest) -> None:
    """Raise ``InvalidRequestError`` for the first field that no model could accept."""
    _check_prompt(request)
    _check_integer("max_tokens", request.max_tokens, 1, MAX_TOKENS)
    _check_sampling(request.sampling)
    if request.sampling.min_tokens > request.max_tokens:
        raise InvalidRequestError("min_tokens", f"must be at most max_tokens {request.max_tokens}")
    _check_optional("seed", request.seed, 0, MAX_SEED)
    _check_optional("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    _check_optional("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_optional("num_speculative_tokens", request.num_speculative_tokens, 0, MAX_DRAFT_LENGTH)
    _check_texts("stop", request.stop)
    _check_texts("bad_words", request.bad_words)
    _check_ids("stop_token_ids", request.stop_token_ids)
    _check_length("request_id", len(request.request_id), MAX_REQUEST_ID, "characters")
    _check_encodable("request_id", request.request_id)


def check_against_model(
    request: GenerationRequest, prompt_token_ids: tuple[int, ...], *, num_token_ids: int, max_model_len: int
) -> None:
    """Raise ``InvalidRequestError`` for the first field that this model cannot accept.

    ``num_token_ids``: ids are below it. ``max_model_len``: the longest prompt and output together.
    """
    if not prompt_token_ids:
        raise InvalidRequestError(_prompt_field(request), "must give at least one token")
    _check_below(_prompt_field(request), prompt_token_ids, num_token_ids)
    if len(prompt_token_ids) >= max_model_len:
        raise InvalidRequestError(
            _prompt_field(request),
            f"has {len(prompt_token_ids)} tokens; at most {max_model_len - 1} leave room for one of output",
        )
    sampling = request.sampling
    _check_below("stop_token_ids", request.stop_token_ids, num_token_ids)
    _check_below("logit_bias", (token_id for token_id, _ in sampling.logit_bias), num_token_ids)
    _check_below("allowed_token_ids", sampling.allowed_token_ids, num_token_ids)
    _check_below("bad_words", (token_id for word in sampling.bad_words for token_id in word), num_token_ids)


def _prompt_field(request: GenerationRequest) -> str:
    return "prompt" if request.prompt is not None else "prompt_token_ids"


def _check_prompt(request: GenerationRequest) -> None:
    if (request.prompt is None) == (request.prompt_token_ids is None):
        raise InvalidRequestError("prompt", "exactly one of prompt and prompt_token_ids must be given")
    if request.prompt is not None:
        if not request.prompt:
            raise InvalidRequestError("prompt", "must not be empty")
        _check_length("prompt", len(request.prompt), MAX_PROMPT_CHARACTERS, "characters")
        _check_encodable("prompt", request.prompt)
    elif not request.prompt_token_ids:
        raise InvalidRequestError("prompt_token_ids", "must not be empty")
    else:
        _check_length("prompt_token_ids", len(request.prompt_token_ids), MAX_PROMPT_TOKENS, "ids")
        _check_ids("prompt_token_ids", request.prompt_token_ids)


def _check_sampling(sampling: SamplingParams) -> None:
    _check_number("temperature", sampling.temperature, at_least=0.0)
    _check_number("top_p", sampling.top_p, above=0.0, at_most=1.0)
    _check_integer("top_k", sampling.top_k, -1, MAX_TOKENS)
    _check_number("min_p", sampling.min_p, at_least=0.0, at_most=1.0)
    _check_number("repetition_penalty", sampling.repetition_penalty, above=0.0)
    _check_number("frequency_penalty", sampling.frequency_penalty, at_least=-2.0, at_most=2.0)
    _check_number("presence_penalty", sampling.presence_penalty, at_least=-2.0, at_most=2.0)
    _check_integer("min_tokens", sampling.min_tokens, 0, MAX_TOKENS)
    _check_ids("logit_bias", (token_id for token_id, _ in sampling.logit_bias))
    for _, bias in sampling.logit_bias:
        _check_number("logit_bias", bias, at_least=-100.0, at_most=100.0)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids)


def _check_number(
    name: str, value: float, *, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(name, f"must be a number, not {value!r}")
    if not math.isfinite(value) or value <= above or value < at_least or value > at_most:
        raise InvalidRequestError(name, f"must be {_range(above, at_least, at_most)}, not {value}")


def _range(above: float, at_least: float, at_most: float) -> str:
    bounds = []
    if math.isfinite(above):
        bounds.append(f"above {above:g}")
    if math.isfinite(at_least):
        bounds.append(f"at least {at_least:g}")
    if math.isfinite(at_most):
        bounds.append(f"at most {at_most:g}")
    return " and ".join(["finite", *bounds])


def _check_integer(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, f"must be a whole number, not {value!r}")
    if not least <= value <= most:
        raise InvalidRequestError(name, f"must be from {least} to {most}, not {value}")


def _check_optional(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None:
        _check_integer(name, value, least, most)


def _check_ids(name: str, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        _check_integer(name, token_id, 0, MAX_TOKENS)


def _check_below(name: str, token_ids: Iterable[int], num_token_ids: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < num_token_ids:
            raise InvalidRequestError(name, f"token id {token_id} is not from 0 to {num_token_ids - 1}")


def _check_texts(name: str, texts: tuple[str, ...]) -> None:
    if len(texts) > MAX_STOPS:
        raise InvalidRequestError(name, f"must be at most {MAX_STOPS} texts, not {len(texts)}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(name, f"must be texts that are not empty, not {text!r}")
        _check_encodable(name, text)


def _check_encodable(name: str, text: str) -> None:
    """Half of a surrogate pair is a Python string, but no text that could be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(name, f"is no Unicode text: {error.reason} at {error.start}") from None


def _check_length(name: str, length: int, most: int, unit: str) -> None:
    if length > most:
        raise InvalidRequestError(name, f"has {length} {unit}; at most {most}")
