"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from outrider.gateway.protocol.chat import ChatFields
from outrider.gateway.protocol.fields import TokenId


class TokenizeRequest(ChatFields):
    """A text, or messages for the chat template."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    tokens: list[TokenId]
