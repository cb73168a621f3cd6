"""Sessions of one target: their mode, the state of each that the controller keeps, and what it asks of all of them."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from outrider_coordinator.speculation.controller import DraftLengthController
    from outrider_coordinator.speculation.order import Order

SessionVerdict: TypeAlias = "tuple[ControlledSession, int, int, int]"
"""A judged step: its session, the drafted and the accepted tokens, and the committed tokens that its draft lacks."""


class Mode(enum.StrEnum):
    """Decoding mode of a target's sessions."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"

    @property
    def other(self) -> Mode:
        """The other of the two."""
        return Mode.PLAIN if self is Mode.SPECULATIVE else Mode.SPECULATIVE


class ControlledSession:
    """Draft length and timing of one session."""

    __slots__ = (
        "began_s", "context", "controller", "has_begun", "has_drafted", "has_ever_drafted", "is_ahead", "length",
        "limit", "num_left", "num_probes", "num_rounds", "num_states", "num_uncomputed", "order", "reads_states",
        "round_began",
    )  # fmt: skip

    def __init__(
        self, limit: int, *, reads_states: bool = False, max_tokens: int = sys.maxsize, num_prompt_tokens: int = 0
    ) -> None:
        """``limit``: largest draft length; ``max_tokens``: maximum of the tokens to come."""
        self.limit = limit
        self.controller: DraftLengthController | None = None
        """Controller of its target; None while it lives on none, and where lengths are fixed."""
        self.order: Order | None = None
        """Order of its target, likewise; None where there is no choice."""
        self.num_left = max_tokens
        self.context = num_prompt_tokens
        """Committed tokens."""
        self.reads_states = reads_states
        """True if its draft reads hidden states, so that the target computes again what the draft lacks."""
        self.num_states = 0
        """Positions whose hidden states were asked for, and that its draft has not taken."""
        self.length = 0
        """Draft length of the next step."""
        self.num_rounds = self.num_probes = self.num_uncomputed = 0
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

    def enter(self, length: int) -> None:
        """The session moves to a target, which computes its prompt first."""
        self.has_begun, self.began_s, self.round_began, self.num_rounds = False, None, None, 0
        self.has_drafted = self.has_ever_drafted = False
        self.length = min(length, self.limit)

    def note_verdict(self, now: float, num_drafted: int, num_accepted: int, num_uncomputed: int) -> float | None:
        """Take in one verdict; returns when the judged round began, or None where it cannot be timed: one in which a
        session starts to draft may include prefill of its draft.
        """
        began = None if num_drafted and not self.has_drafted else self.round_began
        self.num_left -= num_accepted + 1
        self.context += num_accepted + 1
        self.round_began, self.has_drafted, self.num_uncomputed = now, num_drafted > 0, num_uncomputed
        self.num_rounds += 1
        self.has_ever_drafted |= num_drafted > 0
        return began


class Population:
    """Sessions of one target, in the order in which they came."""

    def __init__(self) -> None:
        self._sessions: dict[ControlledSession, None] = {}
        self.num_prompts = 0
        """Sessions whose prompt is being computed."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ControlledSession]:
        return iter(self._sessions)

    def __contains__(self, session: object) -> bool:
        return session in self._sessions

    def add(self, session: ControlledSession) -> None:
        """A session whose prompt is to be computed."""
        self._sessions[session] = None
        self.num_prompts += 1

    def remove(self, session: ControlledSession) -> None:
        """A session that leaves the target."""
        del self._sessions[session]
        self.num_prompts -= not session.has_begun

    @property
    def has_prompts(self) -> bool:
        """True if a session's prompt is being computed."""
        return self.num_prompts > 0

    @property
    def may_draft(self) -> bool:
        """True if any session's request allows drafts."""
        return any(session.limit for session in self._sessions)

    @property
    def has_ever_drafted(self) -> bool:
        """True if any session has drafted on this target."""
        return any(session.has_ever_drafted for session in self._sessions)

    @property
    def reads_states(self) -> bool:
        """True if a session's draft reads hidden states."""
        return any(session.reads_states for session in self._sessions)

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens that the drafts lack together."""
        return sum(session.num_uncomputed for session in self._sessions if session.limit)

    @property
    def context(self) -> float:
        """Mean number of tokens in the sessions' KV caches."""
        return sum(session.context for session in self._sessions) / max(len(self._sessions), 1)

    @property
    def mean_length(self) -> float:
        """Mean draft length of the sessions' next steps."""
        return sum(session.length for session in self._sessions) / max(len(self._sessions), 1)

    def set_length(self, length: int) -> None:
        """Set the draft length of all sessions, each up to its limit."""
        for session in self._sessions:
            session.length = min(length, session.limit)

    def interrupt(self) -> None:
        """The sessions' rounds under way cannot be timed."""
        for session in self._sessions:
            session.round_began = None
