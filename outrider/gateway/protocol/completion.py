"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from outrider.errors import InvalidRequestError
from outrider.gateway.protocol.fields import MAX_GENERATIONS, MAX_PROMPTS, GenerationFields, TokenId

DEFAULT_MAX_TOKENS = 16
Prompt = str | tuple[int, ...]
"""One prompt: text, or token ids."""


class CompletionRequest(GenerationFields):
    """A request for completions of one or several prompts."""

    input_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: (
        Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
        | str
        | Annotated[list[str], Field(fail_fast=True)]
        | None
    ) = None
    """Invalid from its first invalid entry on: an error for each of a million would take gigabytes."""
    echo: bool | None = None
    """Give the prompt back before the output."""
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts in order; ``InvalidRequestError`` for none or too many."""
        if self.prompt is None or self.prompt == []:
            raise InvalidRequestError("prompt", "must be given, and not be empty")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [tuple(self.prompt)]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"has {len(self.prompt)} prompts; at most {MAX_PROMPTS}")
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt]

    @property
    def is_echo_alone(self) -> bool:
        """True if only the prompt is requested, as evaluations do to read its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def wanted_tokens(self) -> int:
        """Maximum number of output tokens."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Number of prompt logprobs: as requested, or as an echo requires."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    def check(self) -> None:
        """Raise ``InvalidRequestError`` for more choices than one request may have."""
        num_prompts = len(self.prompts)
        if num_prompts * self.num_choices > MAX_GENERATIONS:
            raise InvalidRequestError(
                "n",
                f"is {self.num_choices} for each of {num_prompts} prompts, which makes"
                f" {num_prompts * self.num_choices} choices; at most {MAX_GENERATIONS} in one request",
            )
