"""The state of one session that the draft length controller keeps."""

from __future__ import annotations

import sys
from typing import TypeAlias

_NEW_ROUNDS = 12
"""Rounds after which a session is no longer new."""

SessionVerdict: TypeAlias = "tuple[ControlledSession, int, int, int]"
"""A judged step: its session, the drafted and the accepted tokens, and the committed tokens that its draft lacks."""


class ControlledSession:
    """Draft length and timing of one session."""

    __slots__ = (
        "began_s", "context", "draft_lag", "has_begun", "has_drafted", "has_ever_drafted", "is_ahead", "length",
        "limit", "max_tokens", "num_left", "num_probes", "num_rounds", "reads_states", "round_began",
    )  # fmt: skip

    def __init__(
        self, limit: int, *, reads_states: bool = False, max_tokens: int = sys.maxsize, num_prompt_tokens: int = 0
    ) -> None:
        """``limit``: largest draft length; ``max_tokens``: maximum of the tokens to come."""
        self.limit = limit
        self.max_tokens = self.num_left = max_tokens
        self.context = num_prompt_tokens
        """Committed tokens."""
        self.reads_states = reads_states
        """True if its draft reads hidden states, so that the target computes again what the draft lacks."""
        self.length = 0
        """Draft length of the next step."""
        self.num_rounds = self.num_probes = self.draft_lag = 0
        self.has_drafted = self.has_ever_drafted = False
        """True if the last step, or any on this target, had draft tokens."""
        self.round_began: float | None = None
        """Time of the last verdict; None where the round since then cannot be timed."""
        self.began_s: float | None = None
        """Seconds of service when its prompt had been computed."""
        self.has_begun = False
        """True if its prompt has been computed."""
        self.is_ahead = False
        """True if its target begins its steps by itself, and its draft goes on meanwhile."""

    @property
    def is_new(self) -> bool:
        """True if nearly all of its output is still to come."""
        return self.num_rounds < _NEW_ROUNDS

    def enter(self, length: int) -> None:
        """The session moves to a target, which computes its prompt first."""
        self.has_begun, self.began_s, self.round_began, self.num_rounds = False, None, None, 0
        self.has_drafted = self.has_ever_drafted = False
        self.length = min(length, self.limit)

    def note_verdict(self, now: float, num_drafted: int, num_accepted: int, draft_lag: int) -> float | None:
        """Take in one verdict; returns when the judged round began, or None where it cannot be timed: one in which a
        session starts to draft may include prefill of its draft.
        """
        began = None if num_drafted and not self.has_drafted else self.round_began
        self.num_left -= num_accepted + 1
        self.context += num_accepted + 1
        self.round_began, self.has_drafted, self.draft_lag = now, num_drafted > 0, draft_lag
        self.num_rounds += 1
        self.has_ever_drafted |= num_drafted > 0
        return began
