"""Request bodies of the HTTP API: fields, types, and refused fields. ``docs/http.md`` lists each field."""

from outrider.gateway.protocol.chat import ChatCompletionRequest
from outrider.gateway.protocol.completion import CompletionRequest
from outrider.gateway.protocol.parsing import parse_body, parsing
from outrider.gateway.protocol.tokenize import DetokenizeRequest, TokenizeRequest

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "TokenizeRequest",
    "parse_body",
    "parsing",
]
