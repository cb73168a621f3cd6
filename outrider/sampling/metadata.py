"""Sampling metadata: what the scoring kernels are told of a session's rows and what no step changes."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.scoring import Wish, ask
from outrider.ports import Open
from outrider.sampling.parameters import SMALLEST_TEMPERATURE, is_greedy, is_truncated, needs_adjusting
from outrider.types import JudgingRule

_FUSED_RULES = {JudgingRule.GREEDY, JudgingRule.COUPLED, JudgingRule.REJECTION, JudgingRule.TYPICAL}
_PAST_FLOAT32 = 2.0**128 - 2.0**103
"""The least that float32 rounds to infinity."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Of one session."""

    rule: JudgingRule
    is_fused: bool
    """Whether there are kernels for it."""
    is_adjusted: bool
    """Whether its logits are adjusted before kernels see them."""
    draft: bytes
    """What ``ask`` gives for the row of a draft token whose support is asked about."""
    last: bytes
    """And for every other row: after the last draft token all have none."""
    limit: int
    """Ids from here on are never drawn; 0: the vocabulary's end."""
    bound: float
    """A row's largest logit is less, or float32 does not hold it once it is divided by the temperature."""

    @classmethod
    def of(cls, open_: Open) -> SamplingMetadata:
        """The metadata of a session."""
        rule, sampling = open_.judging_rule, open_.sampling
        is_cut = not is_greedy(open_) and is_truncated(sampling)
        temperature = 1.0 if is_greedy(open_) else max(sampling.temperature, SMALLEST_TEMPERATURE)
        draft, last = (
            ask(
                wish | Wish.CUTS if is_cut else wish,
                temperature=temperature,
                seed=open_.seed,
                min_p=sampling.min_p,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            for wish in _wishes(rule)
        )
        return cls(
            rule=rule,
            is_fused=open_.num_logprobs is None and rule in _FUSED_RULES,
            is_adjusted=needs_adjusting(open_),
            draft=draft,
            last=last,
            limit=open_.num_token_ids,
            bound=temperature * _PAST_FLOAT32,
        )


def _wishes(rule: JudgingRule) -> tuple[Wish, Wish]:
    """What is wished of the row of a draft token with a support, and of all others."""
    if rule is JudgingRule.REJECTION:
        return Wish.DRAWS | Wish.EXCLUDES, Wish.DRAWS
    if rule is JudgingRule.TYPICAL:
        return Wish.ENTROPY, Wish.DRAWS
    wish = Wish.COUPLED if rule is JudgingRule.COUPLED else Wish(0)
    return wish, wish
