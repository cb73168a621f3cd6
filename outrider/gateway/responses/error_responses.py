"""Errors in the form of the OpenAI API: the table of errors and HTTP statuses, and paths that are not served."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from outrider import errors
from outrider.errors import CapacityError, InvalidRequestError, OutriderError

if TYPE_CHECKING:
    from outrider.gateway.protocol.grammars import GrammarField

_STATUSES: dict[type[OutriderError], HTTPStatus] = {
    errors.InvalidRequestError: HTTPStatus.BAD_REQUEST,
    errors.UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    errors.ModelNotFoundError: HTTPStatus.NOT_FOUND,
    errors.CapacityError: HTTPStatus.TOO_MANY_REQUESTS,
    errors.UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.RequestCancelledError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.DeadlineError: HTTPStatus.GATEWAY_TIMEOUT,
}
_KINDS = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "UnsupportedMediaTypeError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.GATEWAY_TIMEOUT: "TimeoutError",
}
_OF_PROMPTS = {"prompt_token_ids": "prompt"}
_OF_CHATS = {"prompt_token_ids": "messages", "prompt": "messages", "logprobs": "top_logprobs"}
"""Fields of the SDK that a chat request calls by another name."""

API_KEY = "an API key is asked for: Authorization: Bearer KEY, with a key that is known here"
_SHOWN_CHARACTERS = 80
_MESSAGE_CHARACTERS = 500
"""Longest message, as in the status of a gRPC call."""

Json = dict[str, Any]


def shortened(text: str, most: int = _SHOWN_CHARACTERS) -> str:
    """The beginning of a caller's value, as a message shows it."""
    return text if len(text) <= most else f"{text[:most]}..."


def error_status(error: Exception) -> HTTPStatus:
    """The HTTP status of an error; 500 for an internal error."""
    found = (status for kind, status in _STATUSES.items() if isinstance(error, kind))
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)


def error_body(error: Exception) -> Json:
    """The body of an ``OutriderError``; of any other error only that it occurred."""
    known = isinstance(error, OutriderError)
    message = str(error) if known else "internal error; the gateway's log says more"
    if isinstance(error, errors.UnauthenticatedError):
        message = API_KEY  # a coordinator's own words are for its callers over gRPC
    return make_error_body(error_status(error), message, error.field if isinstance(error, OutriderError) else "")


def make_error_body(status: HTTPStatus, message: str, field: str = "") -> Json:
    """The form of the OpenAI API."""
    kind = _KINDS.get(status, "InternalServerError")
    said, param = _encodable(shortened(message, _MESSAGE_CHARACTERS)), _encodable(shortened(field)) or None
    return {"error": {"message": said, "type": kind, "param": param, "code": int(status)}}


def _encodable(text: str) -> str:
    """Text with lone surrogates escaped: a caller's value may have them, and no response can."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_headers(error: Exception) -> dict[str, str]:
    """Headers with the retry delay and the authentication scheme."""
    if isinstance(error, CapacityError):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_ms / 1000)))}
    return {"www-authenticate": "Bearer"} if isinstance(error, errors.UnauthenticatedError) else {}


def in_words_of_prompts(error: OutriderError, grammar: GrammarField | None = None) -> OutriderError:
    """The error with the field names of ``/v1/completions``; ``grammar``: the request's."""
    return _renamed(error, {**_OF_PROMPTS, **_of_grammar(grammar)})


def in_words_of_chats(error: OutriderError, grammar: GrammarField | None = None) -> OutriderError:
    """The error with the field names of ``/v1/chat/completions``; ``grammar``: the request's."""
    return _renamed(error, {**_OF_CHATS, **_of_grammar(grammar)})


def _of_grammar(grammar: GrammarField | None) -> dict[str, str]:
    return {} if grammar is None else {grammar.option: grammar.field}


def _renamed(error: OutriderError, names: Mapping[str, str]) -> OutriderError:
    if not isinstance(error, InvalidRequestError) or error.field not in names:
        return error
    return InvalidRequestError(names[error.field], error.problem)


_TEXT_ALONE = "only text is generated; embeddings, scores and classes are not computed"
_NO_MEDIA = "only text is read and written"
_NOT_STORED = "nothing is stored"
_UNSERVED = {
    **dict.fromkeys(("embeddings", "rerank", "score", "pooling", "classify", "moderations"), _TEXT_ALONE),
    **dict.fromkeys(("audio", "images", "videos", "realtime"), _NO_MEDIA),
    **dict.fromkeys(
        ("files", "uploads", "batches", "fine_tuning", "assistants", "threads", "vector_stores", "conversations"),
        _NOT_STORED,
    ),
    "messages": "Anthropic's API is not served; /v1/chat/completions is",
    "load": "the gateway's load is outrider_http_requests_running of /metrics",
}


def unserved_path(path: str) -> str | None:
    """Reason why a known path of OpenAI's or vLLM's APIs is not served; None for any other path."""
    parts = [part for part in path.split("/") if part and part not in ("v1", "v2")]
    return _UNSERVED.get(parts[0]) if parts else None
