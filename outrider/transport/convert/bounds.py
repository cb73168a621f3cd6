"""Limits of public requests and of link items, checked on the message before any conversion, copy or loop.

``len`` of a repeated field is cheap, whatever its size. ``outrider.limits`` defines the limits. A link item beyond a
limit ends only its session (``reading.command_within``, ``reading.event_within``).
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider import limits
from outrider.chat import MAX_DOCUMENTS, MAX_MESSAGES, MAX_TOOLS
from outrider.errors import InvalidRequestError
from outrider.limits import ANY_MODEL, ModelLimits
from outrider.v1 import chat_pb2, generation_pb2, link_pb2, sampling_pb2

PACKED_PROMPT = "packed_prompt_token_ids"
TOKEN_BYTES = 4
"""Bytes of a packed token id."""


def check_request_message(message: generation_pb2.GenerateRequest, model: ModelLimits) -> None:
    """Raise ``InvalidRequestError`` for the first field beyond its limit."""
    _check_prompt(message, model)
    _check_resumption(message, model)
    limits.STOP_TEXTS.check("stop", len(message.stop))
    limits.STOP_TOKEN_IDS.check("stop_token_ids", len(message.stop_token_ids))
    limits.BAD_WORDS.check("bad_words", len(message.bad_words) + len(message.sampling.bad_words))
    check_sampling(message.sampling, model)
    _check_texts("stop", message.stop, limits.STOP_TEXT)
    _check_texts("bad_words", message.bad_words, limits.BAD_WORD)
    limits.BAD_WORDS_CHARACTERS.check("bad_words", sum(map(len, message.bad_words)))
    limits.REQUEST_ID.check("request_id", len(message.request_id))
    limits.CACHE_SALT.check("cache_salt", len(message.cache_salt))


def _num_prompt_ids(message: generation_pb2.GenerateRequest) -> int:
    num_bytes = len(message.packed_prompt_token_ids)
    if num_bytes % TOKEN_BYTES:
        raise InvalidRequestError(PACKED_PROMPT, f"has {num_bytes} bytes; each id has {TOKEN_BYTES}")
    return num_bytes // TOKEN_BYTES + len(message.prompt_token_ids.token_ids)


def _check_prompt(message: generation_pb2.GenerateRequest, model: ModelLimits) -> None:
    prompt = message.WhichOneof("prompt")
    if prompt in ("prompt_token_ids", PACKED_PROMPT):
        limits.PROMPT_TOKENS.check("prompt_token_ids", count := _num_prompt_ids(message))
        model.check_prompt("prompt_token_ids", count)
    elif prompt == "chat":
        _check_chat(message.chat)
    else:
        limits.PROMPT_CHARACTERS.check("prompt", len(message.prompt_text))


def _check_chat(chat: chat_pb2.Chat) -> None:
    MAX_MESSAGES.check("messages", len(chat.messages))
    MAX_TOOLS.check("tools", len(chat.tools_json))
    MAX_DOCUMENTS.check("documents", len(chat.documents_json))
    limits.CHAT_TEMPLATE.check("chat_template", len(chat.chat_template))
    limits.CHAT_TEMPLATE_KWARGS.check("chat_template_kwargs", len(chat.template_kwargs_json))
    num_characters = sum(
        len(message.role) + len(message.content) + len(message.fields_json) for message in chat.messages
    )
    limits.PROMPT_CHARACTERS.check("messages", num_characters)
    limits.PROMPT_CHARACTERS.check("tools", sum(map(len, chat.tools_json)))
    limits.PROMPT_CHARACTERS.check("documents", sum(map(len, chat.documents_json)))


def _check_resumption(message: generation_pb2.GenerateRequest, model: ModelLimits) -> None:
    count = len(message.resume.emitted_token_ids)
    limits.EMITTED_TOKEN_IDS.check(limits.EMITTED, count)
    # Of a prompt of text the length is not known yet.
    model.check_emitted(_num_prompt_ids(message), count)
    limits.MODEL_NAME.check("resume.model", len(message.resume.model))


def check_sampling(message: sampling_pb2.SamplingParams, model: ModelLimits) -> None:
    """Raise ``InvalidRequestError`` for the first list beyond its limit; bad words are counted by the caller."""
    limits.LOGIT_BIAS.check("logit_bias", len(message.logit_bias))
    limits.ALLOWED_TOKEN_IDS.check("allowed_token_ids", len(message.allowed_token_ids))
    model.check_allowed(len(message.allowed_token_ids))
    limits.BAD_WORDS_TOKENS.check("bad_words", sum(len(word.token_ids) for word in message.bad_words))
    limits.GRAMMAR_CHARACTERS.check("grammar", message.grammar.ByteSize() if message.HasField("grammar") else 0)
    limits.GRAMMAR_AFTER.check("grammar_after", len(message.grammar.after))


def _check_texts(field: str, texts: Iterable[str], longest: limits.Bound) -> None:
    for text in texts:
        longest.check(field, len(text))


def check_open(message: link_pb2.Open, model: ModelLimits = ANY_MODEL) -> None:
    """Raise ``InvalidRequestError`` for the first field beyond its limit, also for this model."""
    limits.LINK_BAD_WORDS.check("bad_words", len(message.sampling.bad_words))
    check_sampling(message.sampling, model)
    limits.LINK_ENDING_TOKEN_IDS.check("eos_token_ids", len(message.eos_token_ids))
    limits.LINK_BANNED_TOKEN_IDS.check("banned_token_ids", len(message.banned_token_ids))
    limits.LINK_LOGPROBS.check("num_logprobs", message.num_logprobs)
    limits.LINK_LOGPROBS.check("num_prompt_logprobs", message.num_prompt_logprobs)
    limits.REQUEST_ID.check("request_id", len(message.request_id))
    limits.REQUEST_ID.check("trace_id", len(message.trace_id))
    limits.CACHE_SALT.check("cache_salt", len(message.cache_salt))
    limits.LINK_HASH.check("prefix_hash_key", len(message.prefix_hash_key))
    limits.LINK_HIDDEN_LAYERS.check("hidden_state_layers", len(message.hidden_state_layers))


def check_prepare(message: link_pb2.Prepare) -> None:
    """Raise ``InvalidRequestError`` for more steps than any session can have."""
    limits.LINK_PREPARED_STEPS.check("num_steps", message.num_steps)


_DESCRIPTION_TEXTS = tuple(
    field.name
    for field in link_pb2.ModelDescription.DESCRIPTOR.fields
    if isinstance(getattr(link_pb2.ModelDescription(), field.name), str)
)


def check_description(message: link_pb2.ModelDescription) -> None:
    """Raise ``InvalidRequestError`` for the first list, text or file beyond its limit."""
    for name in _DESCRIPTION_TEXTS:
        limits.LINK_TEXT.check(name, len(getattr(message, name)))
    for file in message.tokenizer_files:
        limits.LINK_TEXT.check("tokenizer_files", len(file.name))
    limits.TOKENIZER_BYTES.check("tokenizer_files", sum(len(file.content) for file in message.tokenizer_files))
    limits.LINK_ENDING_TOKEN_IDS.check("eos_token_ids", len(message.eos_token_ids))
    limits.LINK_HIDDEN_LAYERS.check("hidden_state_layers", len(message.hidden_state_layers))
    limits.LINK_FILES.check("tokenizer_files", len(message.tokenizer_files))
    limits.LINK_FILES.check("acceptance_methods", len(message.acceptance_methods))
    limits.LINK_FILES.check("plane_kinds", len(message.plane_kinds))
    limits.LINK_PAGES.check("num_pages", message.num_pages)
    limits.LINK_STEP_COSTS.check("step_costs", len(message.step_costs))
