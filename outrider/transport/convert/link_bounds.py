"""Limits of link items in both directions, checked on the message before any conversion.

An item beyond a limit ends only its session, because the message around it is well-formed. ``outrider.limits`` defines
the limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from outrider import limits, ports
from outrider.errors import InvalidRequestError
from outrider.limits import ANY_MODEL, ModelLimits
from outrider.transport.convert.request_bounds import check_sampling
from outrider.v1 import link_pb2 as pb

ValueT = TypeVar("ValueT")


def command_within(read: Callable[[Any], ValueT], message: Any) -> ValueT | ports.Rejected:  # noqa: ANN401
    """The command, or a ``Rejected`` in place of one beyond a limit."""
    try:
        return read(message)
    except InvalidRequestError as error:
        return ports.Rejected(message.session, message.generation, error)


def event_within(
    read: Callable[..., ValueT],
    message: Any,  # noqa: ANN401 - generated types share no base
    *rest: Any,  # noqa: ANN401
) -> ValueT | ports.SessionFailed:
    """The event, or the failure of its session if it is beyond a limit."""
    try:
        return read(message, *rest)
    except InvalidRequestError as error:
        return ports.SessionFailed(message.session, message.generation, "ProtocolError", str(error), error.field)


def check_open(message: pb.Open, model: ModelLimits = ANY_MODEL) -> None:
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


def check_extend(message: pb.Extend) -> None:
    """Raise ``InvalidRequestError`` for the first field beyond its limit, apart from the tokens."""
    limits.LINK_HASH.check("prefix_chain", len(message.prefix_chain))
    limits.REQUEST_ID.check("trace_parent", len(message.trace_parent))


def check_score(message: pb.Score) -> None:
    """Raise ``InvalidRequestError`` for the first field beyond its limit, apart from the arrays."""
    limits.LINK_HASH.check("prefix_chain", len(message.prefix_chain))
    limits.LINK_DRAFT_TOKEN_IDS.check("draft_token_ids", len(message.draft_token_ids))
    limits.REQUEST_ID.check("trace_parent", len(message.trace_parent))


def check_prepare(message: pb.Prepare) -> None:
    """Raise ``InvalidRequestError`` for more steps than any session can have."""
    limits.LINK_PREPARED_STEPS.check("num_steps", message.num_steps)


def check_scores(message: pb.Scores) -> None:
    """Raise ``InvalidRequestError`` for more positions than can be requested."""
    limits.LINK_POSITIONS.check("tokens", len(message.tokens.token_ids))
    limits.LINK_POSITIONS.check("logprobs", len(message.logprobs))
    limits.LINK_TOKEN_IDS.check("prompt_logprobs", len(message.prompt_logprobs))


_DESCRIPTION_TEXTS = tuple(
    field.name
    for field in pb.ModelDescription.DESCRIPTOR.fields
    if isinstance(getattr(pb.ModelDescription(), field.name), str)
)


def check_description(message: pb.ModelDescription) -> None:
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
    limits.LINK_FILES.check("tensor_planes", len(message.tensor_planes))
    limits.LINK_FILES.check("plane_kinds", len(message.plane_kinds))


def shortened(text: str) -> str:
    """A text for logs, truncated to its limit."""
    return text[: limits.LINK_TEXT.most]
