"""Sampling metadata: the parameters of a session for the scoring kernels, derived once."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.scoring import RowFlags, ask
from outrider.ports import Open
from outrider.sampling.parameters import SMALLEST_TEMPERATURE, is_greedy, is_masked_alone, is_truncated, needs_adjusting
from outrider.types import JudgingRule, LogprobsMode

_FUSED_RULES = {JudgingRule.GREEDY, JudgingRule.COUPLED, JudgingRule.REJECTION, JudgingRule.TYPICAL}
_ROW_RULES = (JudgingRule.GREEDY, JudgingRule.COUPLED, JudgingRule.REJECTION)
_PAST_FLOAT32 = 2.0**128 - 2.0**103
"""Smallest number that float32 rounds to infinity."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Parameters of one session for the scoring kernels."""

    rule: JudgingRule
    is_fused: bool
    """True if kernels score this session; otherwise PyTorch does."""
    is_adjusted: bool
    """True if logits processors change its logits before the kernels read them."""
    is_masked: bool
    """True if a grammar is all that changes them."""
    may_be_row: bool
    """True if kernels find its tokens, or its masses, from the model's own logits, of which a grammar may mask some;
    its logprobs are of the unmasked ones."""
    draft: bytes
    """Packed request (``ask``) of the row of a draft token with a support."""
    last: bytes
    """Packed request of every other row, such as the one after the last draft token."""
    limit: int
    """Number of ids that can be drawn; 0 means the whole vocabulary."""
    bound: float
    """Exclusive bound of a row's largest logit: from here on, division by the temperature overflows float32."""

    @classmethod
    def of(cls, open_: Open) -> SamplingMetadata:
        """The metadata of a session."""
        rule, sampling = open_.judging_rule, open_.sampling
        is_cut = not is_greedy(open_) and is_truncated(sampling)
        temperature = 1.0 if is_greedy(open_) else max(sampling.temperature, SMALLEST_TEMPERATURE)
        draft, last = (
            ask(
                flag | RowFlags.CUTS if is_cut else flag,
                temperature=temperature,
                seed=open_.seed,
                min_p=sampling.min_p,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            for flag in _flags(rule)
        )
        is_adjusted, is_masked, is_bare = needs_adjusting(open_), is_masked_alone(open_), open_.num_logprobs is None
        is_row = not is_adjusted or (is_masked and is_bare)
        return cls(
            rule=rule,
            is_fused=is_bare and rule in _FUSED_RULES,
            is_adjusted=is_adjusted,
            is_masked=is_masked,
            may_be_row=is_row and (is_bare or open_.logprobs_mode is LogprobsMode.RAW) and rule in _ROW_RULES,
            draft=draft,
            last=last,
            limit=open_.num_token_ids,
            bound=temperature * _PAST_FLOAT32,
        )


def _flags(rule: JudgingRule) -> tuple[RowFlags, RowFlags]:
    """Requested results for the row of a draft token with a support, and for all other rows."""
    if rule is JudgingRule.REJECTION:
        return RowFlags.DRAWS | RowFlags.EXCLUDES, RowFlags.DRAWS
    if rule is JudgingRule.TYPICAL:
        return RowFlags.ENTROPY, RowFlags.DRAWS
    flag = RowFlags.COUPLED if rule is JudgingRule.COUPLED else RowFlags(0)
    return flag, flag
