"""Greedy and coupled: keep draft tokens while they are the target's own."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.types import TokenScores
from outrider_coordinator.acceptance.verdict import NextToken, Verdict


def judge_coupled(draft_token_ids: Sequence[int], scores: TokenScores) -> Verdict:
    """Accept while draft and target agree; the target's own token is the next one.

    The output is the target's own whatever the draft did: its argmax at temperature 0, and its argmax under the seed's
    noise otherwise.
    """
    own = scores.token_ids
    for index, token_id in enumerate(draft_token_ids):
        if token_id != own[index]:
            return Verdict(index, own[index], NextToken.RECOVERED)
    return Verdict(len(draft_token_ids), own[len(draft_token_ids)], NextToken.BONUS)
