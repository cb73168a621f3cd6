"""Predicates over the sampling parameters of a session, in plain Python."""

from __future__ import annotations

from outrider.ports import Open
from outrider.types import JudgingRule, SamplingParams

SMALLEST_TEMPERATURE = 1e-30
"""Lower bound of the divisor: below it a division could overflow. The distribution is one-hot long before."""


def is_greedy(open_: Open) -> bool:
    """True if the most likely token is taken."""
    return open_.judging_rule is JudgingRule.GREEDY


def is_coupled(open_: Open) -> bool:
    """True if tokens are drawn with the noise that draft and target share."""
    return open_.judging_rule is JudgingRule.COUPLED


def is_truncated(sampling: SamplingParams) -> bool:
    """True if min-p, top-k or top-p truncate the distribution."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def has_penalties(sampling: SamplingParams) -> bool:
    """True if any penalty has an effect."""
    return bool(
        sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty,
    )


def needs_history(sampling: SamplingParams) -> bool:
    """True if the distribution of a position depends on the ids before it, not only on their number."""
    return has_penalties(sampling) or bool(sampling.bad_words) or sampling.grammar is not None


def needs_adjusting(open_: Open) -> bool:
    """True if ``logits_processors.process.adjust_logits`` does more than to keep ids below the limit."""
    return has_token_rules(open_) or has_penalties(open_.sampling)


def is_masked_alone(open_: Open) -> bool:
    """True if a grammar is all that changes the logits."""
    return open_.sampling.grammar is not None and not _has_listed_tokens(open_) and not has_penalties(open_.sampling)


def has_token_rules(open_: Open) -> bool:
    """True if single tokens are banned or biased."""
    return _has_listed_tokens(open_) or open_.sampling.grammar is not None


def _has_listed_tokens(open_: Open) -> bool:
    sampling = open_.sampling
    return bool(
        sampling.allowed_token_ids
        or sampling.min_tokens
        or sampling.logit_bias
        or sampling.bad_words
        or open_.banned_token_ids
    )
