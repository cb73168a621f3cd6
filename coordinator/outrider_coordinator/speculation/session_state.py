"""The state of one session that the draft length controller keeps."""

from __future__ import annotations

from typing import TypeAlias

from outrider_coordinator.speculation.estimates.acceptance_estimate import PRIOR, SessionAcceptance

_NEW_ROUNDS = 12
UNBOUNDED = 1_000_000
"""Tokens to come of a session of which it is not known how many may."""

SessionVerdict: TypeAlias = "tuple[ControlledSession, int, int, int]"
"""A judged step: its session, the drafted and the accepted tokens, and the committed tokens that its draft lacks."""


class ControlledSession:
    """Draft length, acceptance and timing of one session."""

    __slots__ = (
        "acceptance",
        "began_s",
        "draft_lag",
        "expected",
        "has_begun",
        "has_drafted",
        "has_ever_drafted",
        "length",
        "limit",
        "max_tokens",
        "num_left",
        "num_probes",
        "num_rounds",
        "probe_steps",
        "reads_states",
        "round_began",
    )

    def __init__(self, limit: int, *, reads_states: bool = False, max_tokens: int = UNBOUNDED) -> None:
        """``limit``: upper bound of the draft length; ``max_tokens``: of the tokens to come."""
        self.limit = limit
        self.max_tokens = max_tokens
        self.num_left = max_tokens
        """Tokens to come, at most."""
        self.reads_states = reads_states
        """Whether its draft reads hidden states, so that the target computes anew what the draft lacks."""
        self.length = 0
        """Draft length of the next step."""
        self.acceptance = SessionAcceptance()
        self.expected = PRIOR
        """Acceptance estimate of the session at the last choice."""
        self.num_rounds = 0
        """Verdicts so far on this target."""
        self.has_drafted = False
        """Whether the last step had draft tokens."""
        self.has_ever_drafted = False
        """Whether any step on this target had."""
        self.round_began: float | None = None
        """Time of the last verdict; None where the round since then cannot be timed."""
        self.draft_lag = 0
        """Committed tokens that the draft lacks."""
        self.num_probes = 0
        self.probe_steps = 0
        """Steps that are left of the session's probe."""
        self.began_s: float | None = None
        """Seconds of service when its prompt had been computed."""
        self.has_begun = False
        """Whether its prompt has been computed."""

    @property
    def is_new(self) -> bool:
        """Whether nearly all of its output is still to come."""
        return self.num_rounds < _NEW_ROUNDS

    def enter(self, length: int) -> None:
        """The session moves to a target, which computes its prompt first."""
        self.has_begun, self.began_s, self.round_began, self.num_rounds = False, None, None, 0
        self.has_drafted = self.has_ever_drafted = False
        self.length = min(length, self.limit)

    def note_verdict(self, now: float, num_drafted: int, num_accepted: int, draft_lag: int) -> float | None:
        """One verdict; returns when the judged round began, or None where it cannot be timed.

        A round in which a session starts to draft may include prefill of its draft, so it is not timed.
        """
        began = None if num_drafted and not self.has_drafted else self.round_began
        self.num_left -= num_accepted + 1
        self.round_began, self.has_drafted, self.draft_lag = now, num_drafted > 0, draft_lag
        self.num_rounds += 1
        self.has_ever_drafted |= num_drafted > 0
        return began
