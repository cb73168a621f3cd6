"""Session registry: which sessions are open on which link, the newest generation of each, and how sessions end.

A session that was released, refused or has failed is remembered as ended, and items for it are ignored, because they
crossed the answer on the wire. Only ``Open`` with a higher generation brings it back. A session for which nothing comes
for too long is not remembered: what comes for it later is answered with ``SessionLost``, so its coordinator opens it
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from outrider.errors import InvalidRequestError, OutOfPagesError, OutriderError
from outrider.ports import Open, Opened, Preempted, Refused, Release, SessionFailed, SessionLost
from outrider.prefix_hash import PrefixHash
from outrider.serving.session import Limits, SequenceStore, SequenceT, Session, check_open

MAX_ENDED_SESSIONS = 65_536
"""Ended sessions that are remembered of one link, the latest: an item can cross an answer only for a short while."""


@dataclass(slots=True)
class _LinkSessions(Generic[SequenceT]):
    open: dict[int, Session[SequenceT]] = field(default_factory=dict)
    ended: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Last generation of sessions that have ended, oldest first."""

    def newest_generation(self, session: int) -> int:
        known = self.open.get(session)
        return known.generation if known is not None else self.ended.get(session, -1)


class SessionRegistry(Generic[SequenceT]):
    """All sessions of one service."""

    def __init__(self, store: SequenceStore[SequenceT], limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self.session_limits = limits.sessions
        self._links: dict[int, _LinkSessions[SequenceT]] = {}
        self._closed_because: str | None = None

    def __len__(self) -> int:
        """Number of open sessions; one is counted until its pages are free."""
        return sum(len(of_link.open) for of_link in list(self._links.values()))  # asked from other threads too

    def refuse_sessions(self, reason: str) -> None:
        """Refuse every new session from now on; those that are open go on, and may be opened anew."""
        self._closed_because = reason

    @property
    def is_closed(self) -> bool:
        """True if new sessions are refused whatever the room."""
        return self._closed_because is not None

    def get(self, link_id: int, session: int) -> Session[SequenceT] | None:
        """An open session, whatever its generation."""
        of_link = self._links.get(link_id)
        return of_link.open.get(session) if of_link is not None else None

    def is_overtaken(self, link_id: int, session: int, generation: int) -> bool:
        """True if a newer item has been seen for the session."""
        return generation < self._sessions_of(link_id).newest_generation(session)

    def num_pages(self, session: Session[SequenceT]) -> int:
        """KV pages that a session holds."""
        return self._store.num_pages(session.sequence)

    def holds(self, session: Session[SequenceT]) -> bool:
        """True if this very session is still open."""
        return self.get(*session.key) is session

    def open(self, link_id: int, command: Open) -> Refused | SessionFailed | None:
        """Open a session, or open it anew and empty; None when that worked or the item is an old one."""
        of_link = self._sessions_of(link_id)
        newest = of_link.newest_generation(command.session)
        if command.generation < newest:
            return None
        if command.generation == newest:
            return self._open_twice(link_id, of_link, command)
        if self._closed_because is not None and command.session not in of_link.open:
            return self._refuse(of_link, command.session, command.generation, self._closed_because)
        if self._is_full(of_link) and command.session not in of_link.open:
            reason = f"the link has {len(of_link.open)} sessions, as many as it may have"
            return self._refuse(of_link, command.session, command.generation, reason)
        self._end(of_link, command.session)
        reserved = min(command.max_length, self._limits.max_length)
        try:
            check_open(command, self._limits)
            sequence = self._store.open(reserved, command.cache_salt, command.prefix_hash_key)
        except InvalidRequestError as error:
            return self.fail(link_id, command.session, command.generation, error)
        except OutOfPagesError as error:  # a slot for recurrent states, which is held from the beginning
            return self._refuse(of_link, command.session, command.generation, str(error))
        of_link.ended.pop(command.session, None)
        of_link.open[command.session] = Session(link_id, command, sequence, reserved, command.generation)
        return None

    def find(self, link_id: int, session: int, generation: int) -> Session[SequenceT] | SessionLost | None:
        """The session an item is for, its generation noted; None when the item is to be ignored."""
        of_link = self._sessions_of(link_id)
        found = of_link.open.get(session)
        if found is None:
            has_ended = session in of_link.ended
            return None if has_ended else SessionLost(session, generation, "the session is not open on this link")
        if generation < found.generation:
            return None
        found.generation = generation
        return found

    def rewind(self, session: Session[SequenceT], num_kept_tokens: int, prefix_hash: PrefixHash) -> SessionLost | None:
        """Keep the first ``num_kept_tokens`` tokens, if they are there and are the text that the hash is of."""
        reason = ""
        if num_kept_tokens > session.sequence.length:
            reason = f"{session.sequence.length} tokens are held, fewer than num_kept_tokens {num_kept_tokens}"
        elif self._store.prefix_hash(session.sequence, num_kept_tokens) != prefix_hash:
            reason = f"the first {num_kept_tokens} tokens are another text"
        if reason:
            return SessionLost(session.open.session, session.generation, reason)
        if num_kept_tokens < session.sequence.length:  # after a plain step all is kept
            try:
                self._store.truncate(session.sequence, num_kept_tokens)
            except InvalidRequestError as error:  # what its tokens attend to was given back
                return SessionLost(session.open.session, session.generation, str(error))
        return None

    def hash_ahead(self, session: Session[SequenceT], base: int) -> tuple[bytes, list[int]]:
        """Hash what a session holds after its ``base`` committed tokens, which its next item may keep a part of; up to
        the end of a block, since blocks are hashed once. The chain, and the running hashes from ``base`` tokens on.
        """
        return self._store.hash_tails(session.sequence, base)

    def prefix_hash(self, session: Session[SequenceT], length: int) -> PrefixHash:
        """Prefix hash of a session's first ``length`` tokens."""
        return self._store.prefix_hash(session.sequence, length)

    def truncate(self, sessions: Sequence[Session[SequenceT]], lengths: Sequence[int]) -> None:
        """Keep this many tokens of each, which are none fewer than were committed."""
        truncate = self._store.truncate
        for session, length in zip(sessions, lengths, strict=True):
            if session.sequence.length != length:
                truncate(session.sequence, length)

    def adopt_prefix(self, session: Session[SequenceT], token_ids: Sequence[int]) -> Opened | None:
        """Begin an empty session after what is cached of ``token_ids``, always less than all; the answer to its
        ``Open``, if that is due.
        """
        num_cached_tokens = self._store.adopt_prefix(session.sequence, token_ids)
        if session.is_opened_reported:
            return None
        session.is_opened_reported = True
        return Opened(session.open.session, session.open.generation, num_cached_tokens)

    def commit(self, session: Session[SequenceT], length: int) -> None:
        """The first ``length`` tokens of a session are computed and final."""
        session.num_committed = length
        self._store.commit(session.sequence, length)

    def release(self, link_id: int, command: Release) -> bool:
        """End a session; False when the item is an old one."""
        of_link = self._sessions_of(link_id)
        if command.generation < of_link.newest_generation(command.session):
            return False
        self._end(of_link, command.session)
        self._note_ended(of_link, command.session, command.generation)
        return True

    def fail(self, link_id: int, session: int, generation: int, error: OutriderError) -> SessionFailed:
        """End a session that cannot go on; its pages are free."""
        of_link = self._sessions_of(link_id)
        self._end(of_link, session)
        self._note_ended(of_link, session, generation)
        return SessionFailed(session, generation, type(error).__name__, str(error), error.field)

    def sessions(self) -> list[Session[SequenceT]]:
        """All open sessions."""
        return [session for of_link in self._links.values() for session in of_link.open.values()]

    def expire(self, link_id: int, session: int) -> None:
        """End a session and do not remember it: what comes for it later is answered with ``SessionLost``."""
        self._end(self._sessions_of(link_id), session)

    def drop_link(self, link_id: int) -> None:
        """End all sessions of a link and forget those that ended before."""
        of_link = self._links.get(link_id)
        if of_link is not None:
            for session in list(of_link.open):
                self._end(of_link, session)
            del self._links[link_id]

    def _sessions_of(self, link_id: int) -> _LinkSessions[SequenceT]:
        of_link = self._links.get(link_id)
        if of_link is None:
            self._links[link_id] = of_link = _LinkSessions()
        return of_link

    def _is_full(self, of_link: _LinkSessions[SequenceT]) -> bool:
        most = self._limits.sessions.max_per_link
        return most is not None and len(of_link.open) >= most

    def refuse(self, session: Session[SequenceT], reason: str) -> Refused:
        """End a session that has no room to begin."""
        of_link = self._sessions_of(session.link_id)
        self._end(of_link, session.open.session)
        return self._refuse(of_link, session.open.session, session.generation, reason)

    def preempt(self, session: Session[SequenceT]) -> Preempted:
        """End a session whose pages are needed for others."""
        of_link, number = self._sessions_of(session.link_id), session.open.session
        self._end(of_link, number)
        self._note_ended(of_link, number, session.generation)
        return Preempted(number, session.generation, self._limits.retry_after_ms)

    def _refuse(self, of_link: _LinkSessions[SequenceT], session: int, generation: int, reason: str) -> Refused:
        self._note_ended(of_link, session, generation)
        return Refused(session, generation, self._limits.retry_after_ms, reason)

    def _open_twice(self, link_id: int, of_link: _LinkSessions[SequenceT], command: Open) -> SessionFailed | None:
        known = of_link.open.get(command.session)
        if known is None or known.open == command:
            return None
        error = InvalidRequestError("session", f"{command.session} is open with this generation and other parameters")
        return self.fail(link_id, command.session, command.generation, error)

    def _end(self, of_link: _LinkSessions[SequenceT], session: int) -> None:
        known = of_link.open.get(session)
        if known is not None:
            self._store.release(known.sequence)
            del of_link.open[session]

    @staticmethod
    def _note_ended(of_link: _LinkSessions[SequenceT], session: int, generation: int) -> None:
        of_link.ended[session] = generation
        of_link.ended.move_to_end(session)
        if len(of_link.ended) > MAX_ENDED_SESSIONS:
            of_link.ended.popitem(last=False)
