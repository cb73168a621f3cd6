"""What a session's sampling parameters ask for, as predicates. Plain Python; knows no tensor."""

from __future__ import annotations

from outrider.ports import Open
from outrider.types import JudgingRule, SamplingParams

SMALLEST_TEMPERATURE = 1e-30
"""Below it a division could overflow; the distribution is one-hot long before."""


def is_greedy(open_: Open) -> bool:
    """Whether the most likely token is taken."""
    return open_.judging_rule is JudgingRule.GREEDY


def is_coupled(open_: Open) -> bool:
    """Whether tokens are drawn with the noise that draft and target share."""
    return open_.judging_rule is JudgingRule.COUPLED


def is_truncated(sampling: SamplingParams) -> bool:
    """Whether min-p, top-k or top-p cut the distribution, where one is drawn from."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return bool(
        sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty,
    )


def needs_history(sampling: SamplingParams) -> bool:
    """Whether the tokens before a position change its distribution, beyond how many they are."""
    return has_penalties(sampling) or bool(sampling.bad_words)


def needs_adjusting(open_: Open) -> bool:
    """Whether ``logits_processors.process.adjust_logits`` does more than to keep ids below the limit."""
    return has_token_rules(open_) or has_penalties(open_.sampling)


def has_token_rules(open_: Open) -> bool:
    """Whether single tokens are banned or moved."""
    sampling = open_.sampling
    return bool(
        sampling.allowed_token_ids
        or sampling.min_tokens
        or sampling.logit_bias
        or sampling.bad_words
        or open_.banned_token_ids
    )
