"""Prepared prompts: tokenized, rendered from messages, truncated, and checked against the model's length."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.chat import ChatPrompt, checks_of_chat
from outrider.cooperative import run_in_slices
from outrider.errors import InvalidRequestError
from outrider.gateway.protocol.completion import Prompt
from outrider.gateway.protocol.fields import GenerationFields
from outrider.gateway.served_model import ServedModel
from outrider.limits import DETOKENIZED_TOKENS, PROMPT_CHARACTERS

_LONG_CHARACTERS = 20_000
"""Longer texts are tokenized in a thread, so that the streams of others go on."""
_END_CHARACTERS = 64
"""Characters of a prompt's end that reasoning and tool parsers look at."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt in the form that the coordinator accepts."""

    token_ids: tuple[int, ...]
    text: str = ""
    """Empty if it is not requested."""
    end: str = ""
    """End of a chat's rendered text, from which its output goes on."""


async def prepare_prompt(
    model: ServedModel, request: GenerationFields, prompt: Prompt, *, needs_text: bool
) -> PreparedPrompt:
    """A prompt of ``/v1/completions``."""
    if isinstance(prompt, str):
        adds = request.add_special_tokens is not False
        return PreparedPrompt(await _encode(model, request, prompt, adds=adds), prompt if needs_text else "")
    if not prompt:
        raise InvalidRequestError("prompt", "must not hold an empty list")
    kept = _truncate(model, request, prompt)
    return PreparedPrompt(kept, _decode(model, kept) if needs_text else "")


async def prepare_chat(model: ServedModel, request: GenerationFields, chat: ChatPrompt) -> PreparedPrompt:
    """A conversation, through the model's chat template."""
    model.require_tokenizer("messages")
    model.text.chat.check_template(chat)
    await run_in_slices(checks_of_chat(chat))
    text = await model.text.rendering.render(chat)
    adds = bool(request.add_special_tokens)  # the template writes them
    token_ids = await _encode(model, request, text, adds=adds, field="messages")
    return PreparedPrompt(token_ids, end=text[-_END_CHARACTERS:])


def check_length(
    model: ServedModel, prompt: PreparedPrompt, max_tokens: int | None, *, prompt_field: str, tokens_field: str
) -> None:
    """Raise ``InvalidRequestError`` for a prompt that exceeds the model's length, alone or with the requested
    output.
    """
    most, length = model.info.max_model_len, len(prompt.token_ids)
    model.limits.check_prompt(prompt_field, length)
    if max_tokens is not None and length + max_tokens > most:
        raise InvalidRequestError(
            tokens_field, f"is {max_tokens}, and the model takes {most} tokens, of which the prompt has {length}"
        )


async def _encode(
    model: ServedModel, request: GenerationFields, text: str, *, adds: bool, field: str = "prompt"
) -> tuple[int, ...]:
    tokenizer = model.require_tokenizer(field)
    check_text(field, text)
    most, limits = _most_kept(model, request), model.limits

    def encode() -> tuple[int, ...]:
        # As many as the model holds, or more, are no truncation: a text of that length is refused.
        if most is None or most >= limits.max_model_len:
            return tokenizer.encode_prompt(text, limits=limits, add_special_tokens=adds, field=field)
        return tokenizer.encode_truncated(text, most, keeps_end=_keeps_end(request), add_special_tokens=adds)

    token_ids = await asyncio.to_thread(encode) if len(text) > _LONG_CHARACTERS else encode()
    if not token_ids:
        raise InvalidRequestError(field, "must give at least one token" if text else "must not be empty")
    return token_ids


def _decode(model: ServedModel, token_ids: Sequence[int]) -> str:
    """The text of a prompt of ids, whose number is checked first: decoding holds the interpreter lock."""
    model.limits.check_prompt("prompt", len(token_ids))
    if len(token_ids) > DETOKENIZED_TOKENS.most:
        raise InvalidRequestError(
            "echo", f"cannot be set for a prompt of {len(token_ids)} ids; at most {DETOKENIZED_TOKENS.most} are decoded"
        )
    return model.require_tokenizer().decode(token_ids, skip_special_tokens=False)


def _truncate(model: ServedModel, request: GenerationFields, token_ids: Sequence[int]) -> tuple[int, ...]:
    most = _most_kept(model, request)
    if most is None:
        return tuple(token_ids)
    return tuple(token_ids[-most:] if _keeps_end(request) else token_ids[:most])


def _most_kept(model: ServedModel, request: GenerationFields) -> int | None:
    """Number of a prompt's tokens that are kept; None: all of them."""
    most = request.truncate_prompt_tokens
    if most == 0:
        raise InvalidRequestError("truncate_prompt_tokens", "must be above 0, or -1 for what the model holds")
    if most is None or most > 0:
        return most
    return max(1, model.info.max_model_len - max(1, request.wanted_tokens or 1))


def _keeps_end(request: GenerationFields) -> bool:
    return request.truncation_side != "right"


def check_text(field: str, text: str) -> None:
    """Raise ``InvalidRequestError`` for a text that is too long for any model, or not valid Unicode."""
    PROMPT_CHARACTERS.check(field, len(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, f"is no Unicode text: {error.reason} at {error.start}") from None
