"""Verdict: the result of judging a proposal."""

from __future__ import annotations

from outrider.values import step_value


@step_value(frozen=True, slots=True)
class Verdict:
    """Number of accepted draft tokens, and the token after them."""

    num_accepted: int
    next_token_id: int
