"""Parsing of request bodies, with errors that name the field."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from outrider.chat import MAX_DOCUMENTS, MAX_MESSAGES, MAX_TOOLS
from outrider.cooperative import Work, run
from outrider.errors import InvalidRequestError
from outrider.gateway.protocol.chat import ChatCompletionRequest
from outrider.gateway.protocol.completion import CompletionRequest
from outrider.gateway.protocol.fields import GenerationFields
from outrider.gateway.protocol.long_ids import Ids, parse_body_json
from outrider.gateway.protocol.responses import ResponsesRequest
from outrider.gateway.protocol.unsupported import refuse_unsupported
from outrider.gateway.responses.error_responses import shortened
from outrider.limits import (
    ALLOWED_TOKEN_IDS,
    BAD_WORDS,
    DETOKENIZED_TOKENS,
    LOGIT_BIAS,
    PROMPT_TOKENS,
    STOP_TEXTS,
    STOP_TOKEN_IDS,
)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a pair, as JSON escapes it."""
RequestT = TypeVar("RequestT", bound=BaseModel)
_KINDS = {type(None): "null", bool: "a boolean", str: "a text", list: "a list"}
_LENGTHS = {
    "allowed_token_ids": ALLOWED_TOKEN_IDS,
    "bad_words": BAD_WORDS,
    "documents": MAX_DOCUMENTS,
    "input": MAX_MESSAGES,
    "logit_bias": LOGIT_BIAS,
    "messages": MAX_MESSAGES,
    "prompt": PROMPT_TOKENS,
    "stop": STOP_TEXTS,
    "stop_token_ids": STOP_TOKEN_IDS,
    "tokens": DETOKENIZED_TOKENS,
    "tools": MAX_TOOLS,
}


_NEEDED: dict[type[BaseModel], tuple[str, str, str]] = {
    ChatCompletionRequest: ("messages", "prompt", "/v1/completions"),
    CompletionRequest: ("prompt", "messages", "/v1/chat/completions"),
    ResponsesRequest: ("input", "messages", "/v1/chat/completions"),
}
"""Kind of a request: what it needs, and where to send what was given instead."""
_FORMS = {
    "prompt": "must be a text, a list of texts, token ids, or a list of lists of them",
    "stop": "must be a text or a list of texts",
}
"""Fields of several forms, for values of none of them."""


def parse_body(kind: type[RequestT], body: bytes) -> RequestT:
    """Parse a body; ``InvalidRequestError`` names the invalid field and the valid values."""
    return run(parsing(kind, body))


def parsing(kind: type[RequestT], body: bytes) -> Work[RequestT]:
    """``parse_body`` with pauses."""
    given, long_ids = yield from _object(body)
    _check_lengths(given)
    if _SURROGATE.search(body):
        _check_unicode(given)
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _as_request_error(error) from error
    if long_ids:
        request = request.model_copy(
            update={field: ids for field, ids in long_ids.items() if field in kind.model_fields}
        )
    if isinstance(request, GenerationFields):
        refuse_unsupported(given)
        request.note_unknown(given)
        _check(request, given)
    return request


def _object(body: bytes) -> Work[tuple[dict[str, Any], dict[str, Ids]]]:
    try:
        given, long_ids = yield from parse_body_json(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("body", f"must be JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidRequestError("body", f"must be a JSON object, not {_KINDS.get(type(given), 'a number')}")
    return given, long_ids


def _check_unicode(given: dict[str, Any]) -> None:
    """Raise ``InvalidRequestError`` for half of a surrogate pair, which no message can carry."""
    for field, value in given.items():
        try:
            json.dumps({field: value}, ensure_ascii=False).encode()
        except RecursionError:
            continue  # validation names it
        except UnicodeEncodeError as error:
            raise InvalidRequestError(field, f"is no Unicode text: {error.reason}") from None


def _check_lengths(given: dict[str, Any]) -> None:
    """Check lengths before the entries are validated: each invalid one costs an error in every branch of a union."""
    for field, bound in _LENGTHS.items():
        if isinstance(value := given.get(field), list | dict):
            bound.check(field, len(value))


def _check(request: GenerationFields, given: dict[str, Any]) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options", "needs stream to be true")
    if request.stream and (request.prompt_logprobs or 0) > 0:
        raise InvalidRequestError("prompt_logprobs", "is not available with stream")
    needed, other, path = _NEEDED.get(type(request), ("", "", ""))
    if needed and given.get(needed) is None and given.get(other) is not None:
        raise InvalidRequestError(needed, f"must be given; {other} is a field of {path}")
    if given.get("cache_salt") == "":
        raise InvalidRequestError("cache_salt", "must be a text that is not empty, or be left out")
    if isinstance(request, ResponsesRequest):
        request.check(given)
    elif isinstance(request, ChatCompletionRequest | CompletionRequest):
        request.check()
        _ = request.grammar  # for its errors


def _as_request_error(error: ValidationError) -> InvalidRequestError:
    """Error for the first of several problems; for a union, that of the branch that parsed furthest."""
    first = error.errors(include_url=False, include_context=False)
    found = max(first, key=lambda one: len(_path(one["loc"]))) if _is_union(first) else first[0]
    message = found["msg"].removeprefix("Input ").replace("should", "must", 1)
    if (field := _path(found["loc"])) in _FORMS and not isinstance(found["input"], list):
        message = _FORMS[field]
    if found["type"] == "missing":
        return InvalidRequestError(_path(found["loc"]) or "body", "must be given")
    message = message.partition(", unable to ")[0]  # pydantic's words of the value, which is shown
    return InvalidRequestError(_path(found["loc"]) or "body", f"{message}, not {shortened(_as_json(found['input']))}")


def _as_json(value: object) -> str:
    """A value as the caller wrote it; Python's words for it would be foreign."""
    if isinstance(value, str):
        return repr(shortened(value))
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _is_union(found: list[Any]) -> bool:
    return len({one["loc"][0] for one in found if one["loc"]}) == 1 and len(found) > 1


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[2].role``; names of the branches of a union, such as ``list[str]``, are left out."""
    path = ""
    for index, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif index == 0 or (part.isidentifier() and part not in ("str", "int", "float", "bool", "dict")):
            path += f".{shortened(part)}" if path else shortened(part)
    return path
