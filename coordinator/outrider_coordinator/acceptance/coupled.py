"""Greedy and coupled acceptance: accept draft tokens while they equal the target's own."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.types import TokenScores
from outrider_coordinator.acceptance.evidence import Verdict


def judge_coupled(draft_token_ids: Sequence[int], scores: TokenScores) -> Verdict:
    """Accept while draft and target agree; the target's own token is the next one.

    The output does not depend on the draft: it is the target's argmax at temperature 0, and otherwise its argmax with
    the seed's Gumbel noise.
    """
    own = scores.token_ids
    pairs = enumerate(zip(draft_token_ids, own, strict=False))
    accepted = next((index for index, (drafted, token_id) in pairs if drafted != token_id), len(draft_token_ids))
    return Verdict(accepted, own[accepted])
