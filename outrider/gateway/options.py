"""Options of the SDK from the fields of an HTTP request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from outrider.client import GenerateOptions
from outrider.gateway.generations import GenerationChoice
from outrider.gateway.prompts import PreparedPrompt
from outrider.gateway.protocol.fields import GenerationFields
from outrider.gateway.protocol.grammars import GrammarField

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("allowed_token_ids", "bad_words", "cache_salt", "num_speculative_tokens", "acceptance_method"),
    *("draft_ahead", "priority"),
)
"""Fields that the SDK has under the same name."""
_LARGEST_BIAS = 100.0
"""OpenAI's bound, to which larger values are clipped."""
_NUM_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Caller:
    """Facts about the caller of an HTTP request."""

    request_id: str
    trace_parent: str | None = None
    trace_state: str | None = None
    cache_salt: str = ""
    """Cache salt of its API key, for requests that name none."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Values that the two kinds of requests name differently."""

    max_tokens: int | None
    """None: to the end of the context."""
    logprobs: int | None
    prompt_logprobs: int | None
    resume_timeout: float
    grammar: GrammarField | None = None
    grammar_after: str = ""
    """Text after which the output has to match."""
    needs_special_tokens: bool = False
    """The text of special tokens is parsed."""


def make_choices(
    request: GenerationFields, prompts: Sequence[PreparedPrompt], wanted: Wanted, caller: Caller
) -> list[GenerationChoice]:
    """A generation for each choice of each prompt, in the order of the response."""
    shared = _shared_options(request, wanted, caller)
    return list(_choices(request, prompts, shared, caller))


def _choices(
    request: GenerationFields, prompts: Sequence[PreparedPrompt], shared: dict[str, Any], caller: Caller
) -> Iterator[GenerationChoice]:
    num_choices = request.num_choices
    for index in range(len(prompts) * num_choices):
        place, choice = divmod(index, num_choices)
        own: dict[str, Any] = {"prompt_token_ids": prompts[place].token_ids}
        if request.seed is not None:
            own["seed"] = (request.seed + choice) % _NUM_SEEDS
        is_alone = len(prompts) * num_choices == 1
        own["request_id"] = caller.request_id if is_alone else f"{caller.request_id}-{index}"
        yield GenerationChoice(index, place, cast(GenerateOptions, {**shared, **own}))


def _shared_options(request: GenerationFields, wanted: Wanted, caller: Caller) -> dict[str, Any]:
    options = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if caller.cache_salt:
        options.setdefault("cache_salt", caller.cache_salt)
    if request.logit_bias:
        options["logit_bias"] = {
            token_id: max(-_LARGEST_BIAS, min(_LARGEST_BIAS, bias)) for token_id, bias in request.logit_bias.items()
        }
    if wanted.grammar is not None:
        options[wanted.grammar.option] = wanted.grammar.value
        options["grammar_after"] = wanted.grammar_after
    if wanted.needs_special_tokens:
        options["skip_special_tokens"] = False
    if wanted.resume_timeout > 0:
        options |= {"resume": True, "resume_timeout": wanted.resume_timeout}
    named = {
        "max_tokens": wanted.max_tokens,
        "logprobs": wanted.logprobs,
        "prompt_logprobs": wanted.prompt_logprobs,
        "trace_parent": caller.trace_parent,
        "trace_state": caller.trace_state,
    }
    return options | {name: value for name, value in named.items() if value is not None}
