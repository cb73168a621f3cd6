"""Contract of a request to score, whatever the logits are. Knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.errors import ProtocolError
from outrider.ports import Open
from outrider.sampling.rows import ScoreRequest
from outrider.types import JudgingRule, Support


def keep_contract(requests: Sequence[ScoreRequest], vocab_size: int) -> bool:
    """True if all requests keep the contract: a fast check. With different limits, False may be wrong."""
    drafting = [request for request in requests if request.draft_token_ids or request.support is not None]
    if not drafting:
        return True
    limit = min(_limit(request.open, vocab_size) for request in drafting)
    ids = [token_id for request in drafting for token_id in request.draft_token_ids]
    if ids and not 0 <= min(ids) <= max(ids) < limit:
        return False
    supports: list[Support] = []
    for request in drafting:
        if request.open.judging_rule is JudgingRule.REJECTION:
            if request.support is None or not 0 < len(request.support.counts) == len(request.draft_token_ids):
                return False
            supports.append(request.support)
    return not supports or _are_sound(supports, limit)


def _are_sound(supports: Sequence[Support], limit: int) -> bool:
    counts = np.concatenate([support.counts for support in supports])
    firsts = np.cumsum([0, *(len(support.counts) for support in supports[:-1])])
    if counts.min() < 0 or np.add.reduceat(counts, firsts, dtype=np.int64).tolist() != [
        len(support.token_ids) for support in supports
    ]:
        return False
    ids = np.concatenate([support.token_ids for support in supports])
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < limit)


def broken_contract(request: ScoreRequest, vocab_size: int) -> ProtocolError | None:
    """``ProtocolError`` that names what in a request breaks the contract; None if it keeps it. Reads no logits."""
    limit = _limit(request.open, vocab_size)
    if any(not 0 <= token_id < limit for token_id in request.draft_token_ids):
        return _contract_broken("draft_token_ids", f"ids must be from 0 to {limit - 1}")
    if request.open.judging_rule is not JudgingRule.REJECTION:
        return None
    return _broken_support(request, limit)


def _broken_support(request: ScoreRequest, limit: int) -> ProtocolError | None:
    num_drafts, support = len(request.draft_token_ids), request.support
    if support is None:
        return _contract_broken("support", "is needed to score drafts by rejection") if num_drafts else None
    if len(support.counts) != num_drafts or (support.counts < 0).any():
        return _contract_broken("support", f"needs {num_drafts} counts of 0 or more, one for each draft token")
    if support.counts.sum() != len(support.token_ids):
        return _contract_broken("support", f"{len(support.token_ids)} ids, but its counts say {support.counts.sum()}")
    if len(support.token_ids) and not (support.token_ids.min() >= 0 and support.token_ids.max() < limit):
        return _contract_broken("support", f"ids must be from 0 to {limit - 1}")
    return None


def _contract_broken(field: str, message: str) -> ProtocolError:
    error = ProtocolError(f"{field}: {message}")
    error.field = field
    return error


def _limit(open_: Open, vocab_size: int) -> int:
    """Ids are below it."""
    return min(open_.num_token_ids or vocab_size, vocab_size)
