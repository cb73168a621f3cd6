"""``usage``: token counts, with cached tokens and draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.gateway.generations import GenerationChoice
from outrider.generation import GenerationResult

Json = dict[str, Any]


def count_tokens(num_prompt_tokens: int, num_completion_tokens: int) -> Json:
    """The usage of an unfinished request."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def total_usage(
    choices: Sequence[GenerationChoice], results: Sequence[GenerationResult], *, counts_output: bool = True
) -> Json:
    """The usage of a whole request: a prompt counts once, for any number of choices.

    ``results`` are in the order of ``choices``. Draft tokens are counted as the OpenAI API counts predicted tokens.
    """
    first = {choice.prompt: result.usage for choice, result in reversed(list(zip(choices, results, strict=True)))}
    num_prompt = sum(usage.prompt_tokens for usage in first.values())
    num_output = sum(result.usage.completion_tokens for result in results) if counts_output else 0
    num_drafted = sum(result.speculation.num_draft_tokens for result in results)
    num_accepted = sum(result.speculation.num_accepted_tokens for result in results)
    return {
        **count_tokens(num_prompt, num_output),
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_prompt_tokens for usage in first.values())},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        },
    }
