"""Several generations in one call: lists of prompts, and ``n`` generations of each prompt.

Derives the options of each request from those of the call. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from outrider.client.requests import GenerateOptions, build_request
from outrider.errors import InvalidRequestError

Prompt = str | Sequence[int]
"""A text, or token ids."""
OnePrompt = str | list[int] | tuple[int, ...] | None
ManyPrompts = list[str] | tuple[str, ...] | list[list[int]] | list[tuple[int, ...]]

MAX_CONCURRENCY = 64
"""Maximum number of concurrent requests of one call."""

_MAX_N = 1024
_NUM_SEEDS = 1 << 64


def each_request(
    prompt: OnePrompt | ManyPrompts, n: int | None, options: GenerateOptions
) -> list[GenerateOptions] | None:
    """Return the options of each request, ``n`` for each prompt in order; None if the call is one request.

    Seeds count up within the ``n`` of a prompt, so its generations differ and are reproducible. Invalid options raise
    before any request is sent.
    """
    prompts, is_list = _prompts(prompt)
    if n is None and not is_list:
        return None
    count = _check_n(1 if n is None else n)
    made = [_one(one, options, index, f"{row}-{index}") for row, one in enumerate(prompts) for index in range(count)]
    for single in made:
        build_request(single)
    return made


def with_prompt(prompt: Prompt | None, options: GenerateOptions) -> GenerateOptions:
    """Return the options with the positional prompt; ``TypeError`` if the prompt was also given by name."""
    if prompt is None:
        return options
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else 0
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes) or not hasattr(first, "__index__"):
        hint = "; chat() and the option messages take conversations" if isinstance(first, Mapping) else ""
        raise InvalidRequestError("prompt", f"must be a text or token ids, not {prompt!r:.80}{hint}")
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    if options.get("prompt") is not None or options.get("prompt_token_ids") is not None:
        raise TypeError("the prompt was given twice: by its place and by its name")
    return cast(GenerateOptions, {**options, name: prompt})


def _prompts(prompt: OnePrompt | ManyPrompts) -> tuple[list[Prompt | None], bool]:
    """Return the prompts, and whether they were given as a list. A list of integers is one prompt of token ids."""
    if isinstance(prompt, Mapping):
        raise InvalidRequestError("prompt", "must be a text, token ids, or a list of either, not a mapping")
    if prompt is None or isinstance(prompt, str) or not isinstance(prompt, Iterable):
        return [prompt], False
    entries: list[Any] = list(prompt)
    if entries and not any(isinstance(entry, (str, Sequence)) for entry in entries):
        return [entries], False
    if not entries:
        raise InvalidRequestError("prompt", "must hold at least one prompt")
    return entries, True


def _check_n(n: Any) -> int:  # noqa: ANN401 - a user's value
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MAX_N:
        raise InvalidRequestError("n", f"must be a whole number from 1 to {_MAX_N}, not {n!r}")
    return n


def _one(prompt: Prompt | None, options: GenerateOptions, index: int, suffix: str) -> GenerateOptions:
    single = dict(with_prompt(prompt, options))
    if isinstance(seed := single.get("seed"), int) and not isinstance(seed, bool):
        single["seed"] = (seed + index) % _NUM_SEEDS
    if request_id := single.get("request_id"):
        single["request_id"] = f"{request_id}-{suffix}"
    return cast(GenerateOptions, single)
