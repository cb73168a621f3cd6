"""Fields that completions and chat completions share: those of OpenAI, vLLM and Outrider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from outrider.gateway.protocol.grammars import GrammarField, grammar_of
from outrider.gateway.protocol.unsupported import find_misspelled

_INT64 = 1 << 63
MAX_CHOICES = 128
"""Bound on the choices of one prompt, as in OpenAI's API."""
MAX_PROMPTS = 1024
"""Most prompts in one request; vLLM's bound."""
MAX_GENERATIONS = 1024
"""Choices of one request, of all its prompts."""

Seed = Annotated[int, Field(ge=-_INT64, le=_INT64 - 1)]
TokenId = Annotated[int, Field(ge=0)]
MaxTokens = Annotated[int, Field(ge=0)]


Body = dict[str, Any]
"""A JSON object, as it came."""
_GRAMMAR_FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: bool | None = None
    """A last event with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every event."""


class GenerationFields(BaseModel):
    """Fields that control the generation. Null is the same as an absent field; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())
    input_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that the prompts are made of."""

    model: str | None = None
    """Name of the model; None is the one that is served."""
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Choices of each prompt."""
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Seed | None = None
    """Choice i of a prompt draws with ``seed + i``."""
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Most tokens of a prompt that are kept; -1 is what the model holds beside the output."""
    truncation_side: Literal["left", "right"] | None = None
    """Side on which tokens are dropped; left keeps the end."""
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs are written as ``token_id:ID``."""
    return_token_ids: bool | None = None
    response_format: Body | None = None
    structured_outputs: Body | None = None
    guided_json: Body | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    _misspelled: dict[str, str] = PrivateAttr(default_factory=dict)

    num_speculative_tokens: int | None = None
    acceptance_method: str | None = None
    draft_ahead: bool | None = None
    priority: int | None = None
    """Place in the coordinator's queue: lower is earlier."""

    @property
    def misspelled(self) -> Mapping[str, str]:
        """Unknown fields, and the known ones that they resemble."""
        return self._misspelled

    def note_unknown(self, names: Iterable[str]) -> None:
        """Keep the unknown ones of the request's fields that resemble known ones."""
        self._misspelled.update(find_misspelled(names, type(self).model_fields))

    @property
    def grammar(self) -> GrammarField | None:
        """Grammar of the output."""
        return grammar_of({name: getattr(self, name) for name in _GRAMMAR_FIELDS})

    def without_input(self) -> Self:
        """The request without what its prompts were made of, which may be megabytes."""
        return self.model_copy(update=dict.fromkeys(self.input_fields))

    @property
    def wanted_tokens(self) -> int | None:
        """Maximum number of output tokens; None: the rest of the context."""
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def tells_usage_always(self) -> bool:
        """True if every event of a stream has the current usage."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)
