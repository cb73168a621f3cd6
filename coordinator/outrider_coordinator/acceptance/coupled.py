"""Greedy and coupled acceptance: accept draft tokens while they equal the target's own."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.types import TokenScores
from outrider_coordinator.acceptance.verdict import NextToken, Verdict


def judge_coupled(draft_token_ids: Sequence[int], scores: TokenScores) -> Verdict:
    """Accept while draft and target agree; the target's own token is the next one.

    The output does not depend on the draft: it is the target's argmax at temperature 0, and otherwise its argmax with
    the seed's Gumbel noise.
    """
    own = scores.token_ids
    for index, token_id in enumerate(draft_token_ids):
        if token_id != own[index]:
            return Verdict(index, own[index], NextToken.RECOVERED)
    return Verdict(len(draft_token_ids), own[len(draft_token_ids)], NextToken.BONUS)
