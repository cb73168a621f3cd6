"""Request bodies of the HTTP API: fields, types, and refused fields. ``docs/http.md`` lists each field."""

from outrider.gateway.protocol.chat import ChatCompletionRequest
from outrider.gateway.protocol.completion import CompletionRequest
from outrider.gateway.protocol.parsing import parse_body, parsing
from outrider.gateway.protocol.response_input import Conversation
from outrider.gateway.protocol.responses import ResponsesRequest
from outrider.gateway.protocol.tokenize import DetokenizeRequest, TokenizeRequest

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "Conversation",
    "DetokenizeRequest",
    "ResponsesRequest",
    "TokenizeRequest",
    "parse_body",
    "parsing",
]
