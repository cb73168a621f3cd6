"""Forced tokens: text that a grammar leaves no choice about, proposed to the target without a draft.

A grammar forces bytes more often than tokens: after ``{"`` the tokens ``n``, ``na`` and ``name`` may all be legal. The
canonical tokens of forced bytes are a proposal with all probability on each, and are judged as any other.
"""

from __future__ import annotations

import numpy as np

from outrider.types import SparseEvidence
from outrider_coordinator.session.draft_side import NOTHING_DRAFTED, Drafted
from outrider_coordinator.session.state import SessionState

MAX_FORCED_TOKENS = 16
"""Bound on the forced tokens of one step. CUDA graphs cover draft lengths up to this."""

_LEAST_BESIDE_DRAFTS = 2
"""Least number of forced tokens that are proposed in place of a draft's tokens."""
_LEAST_AHEAD = 3
"""Least number of forced tokens where the target computes plain steps ahead, of which it has begun up to two that a
proposal makes useless. It then computes nothing ahead for other sessions either, which costs each of them about one
forward."""


def least_forced(session: SessionState, draft_length: int) -> int:
    """Forced tokens that are worth a step of their own. ``draft_length``: tokens that the draft would be asked for."""
    if draft_length:
        return _LEAST_BESIDE_DRAFTS
    if not session.target.lookahead_credit:
        return 1
    return _LEAST_AHEAD + max(0, session.policy.num_together(session.speculation) - 1)


def forced_proposal(session: SessionState) -> Drafted:
    """The forced tokens after the committed ones, if there are any."""
    request = session.engine_request
    if request.matcher is None:
        return NOTHING_DRAFTED
    most = min(MAX_FORCED_TOKENS, session.output.num_remaining - 1)
    token_ids = session.output.forced_token_ids()[:most] if most > 0 else ()
    if not token_ids or max(token_ids) >= request.rules.num_token_ids:
        return NOTHING_DRAFTED
    if not request.rules.rule.needs_evidence:
        return Drafted(token_ids)
    ones, ids = np.ones(len(token_ids), dtype=np.int32), np.array(token_ids, dtype=np.int32)
    return Drafted(token_ids, SparseEvidence(ones, ids, ones.astype(np.float32)))
