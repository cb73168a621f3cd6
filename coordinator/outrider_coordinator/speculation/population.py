"""Population: the sessions that live on one target, and what the controller asks of all of them."""

from __future__ import annotations

from collections.abc import Iterator

from outrider_coordinator.speculation.session_state import ControlledSession


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
    def drafting(self) -> list[ControlledSession]:
        """Sessions whose requests allow drafts."""
        return [session for session in self._sessions if session.limit]

    @property
    def reads_states(self) -> bool:
        """True if a session's draft reads hidden states."""
        return any(session.reads_states for session in self._sessions)

    @property
    def is_new(self) -> bool:
        """True if most sessions have nearly all of their output before them."""
        return 2 * sum(session.is_new for session in self._sessions) > len(self._sessions)

    @property
    def lag(self) -> int:
        """Committed tokens that the drafts lack together."""
        return sum(session.draft_lag for session in self._sessions if session.limit)

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
