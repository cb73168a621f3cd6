"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from outrider.gateway.protocol.chat import ChatFields
from outrider.gateway.protocol.fields import TokenId

_OF_CHATS = {"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools"}


class TokenizeRequest(ChatFields):
    """A text, or messages for the chat template."""

    prompt: str | None = None
    return_token_strs: bool | None = None

    @property
    def is_chat(self) -> bool:
        """True if the messages are meant. Where there is a prompt too, fields of chats alone say so, as in vLLM."""
        return self.messages is not None and (self.prompt is None or bool(_OF_CHATS & self.model_fields_set))


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    tokens: list[TokenId]
