"""Session table: which sessions are open on which link, the newest generation of each, and how sessions end.

A session that was released, refused or has failed leaves a tombstone, and items for it are ignored, because they
crossed the answer on the wire. Only ``Open`` with a higher generation brings it back. A session for which nothing comes
for too long ends without one: what comes for it later is answered with ``SessionLost``, so its coordinator opens it
again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from outrider.errors import InvalidRequestError, OutriderError
from outrider.ports import Open, Opened, Preempted, Refused, Release, SessionFailed, SessionLost
from outrider.prefix_hash import PrefixHash
from outrider.serving.session import Limits, SequenceStore, SequenceT, Session, SessionKey, check_open

_log = logging.getLogger(__name__)

MAX_TOMBSTONES = 65_536
"""Tombstones kept for one link, the latest: an item can cross an answer only for a short while."""
_CHECKS_PER_TIMEOUT = 4
_NANOSECONDS = 1e9


@dataclass(slots=True)
class _LinkBooks(Generic[SequenceT]):
    sessions: dict[int, Session[SequenceT]] = field(default_factory=dict)
    tombstones: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def newest_generation(self, session: int) -> int:
        known = self.sessions.get(session)
        return known.generation if known is not None else self.tombstones.get(session, -1)


class SessionTable(Generic[SequenceT]):
    """All sessions of one service."""

    def __init__(self, store: SequenceStore[SequenceT], limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self.session_limits = limits.sessions
        self._links: dict[int, _LinkBooks[SequenceT]] = {}
        self._closed_because: str | None = None

    def __len__(self) -> int:
        return sum(len(books.sessions) for books in list(self._links.values()))  # asked from other threads too

    def refuse_sessions(self, reason: str) -> None:
        """Refuse every new session from now on; those that are open go on, and may be opened anew."""
        self._closed_because = reason

    @property
    def is_closed(self) -> bool:
        """Whether new sessions are refused whatever the room."""
        return self._closed_because is not None

    def get(self, link_id: int, session: int) -> Session[SequenceT] | None:
        """An open session, whatever its generation."""
        books = self._links.get(link_id)
        return books.sessions.get(session) if books is not None else None

    def is_overtaken(self, link_id: int, session: int, generation: int) -> bool:
        """Whether a newer item has been seen for the session."""
        return generation < self._books_of(link_id).newest_generation(session)

    def num_pages(self, session: Session[SequenceT]) -> int:
        """KV pages that a session holds."""
        return self._store.num_pages(session.sequence)

    def holds(self, session: Session[SequenceT]) -> bool:
        """Whether this very session is still open."""
        return self.get(*session.key) is session

    def open(self, link_id: int, command: Open) -> Refused | SessionFailed | None:
        """Open a session, or open it anew and empty; None when that worked or the item is an old one."""
        books = self._books_of(link_id)
        newest = books.newest_generation(command.session)
        if command.generation < newest:
            return None
        if command.generation == newest:
            return self._open_twice(link_id, books, command)
        if self._closed_because is not None and command.session not in books.sessions:
            return self._refuse(books, command.session, command.generation, self._closed_because)
        if self._is_full(books) and command.session not in books.sessions:
            reason = f"the link has {len(books.sessions)} sessions, as many as it may have"
            return self._refuse(books, command.session, command.generation, reason)
        self._forget(books, command.session)
        reserved = min(command.max_length, self._limits.max_length)
        try:
            check_open(command, self._limits)
            sequence = self._store.open(reserved, command.cache_salt, command.prefix_hash_key)
        except InvalidRequestError as error:
            return self.fail(link_id, command.session, command.generation, error)
        books.tombstones.pop(command.session, None)
        books.sessions[command.session] = Session(link_id, command, sequence, reserved, command.generation)
        return None

    def find(self, link_id: int, session: int, generation: int) -> Session[SequenceT] | SessionLost | None:
        """The session an item is for, its generation noted; None when the item is to be ignored."""
        books = self._books_of(link_id)
        found = books.sessions.get(session)
        if found is None:
            buried = session in books.tombstones
            return None if buried else SessionLost(session, generation, "the session is not open on this link")
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
        self._store.truncate(session.sequence, num_kept_tokens)
        return None

    def adopt_prefix(self, session: Session[SequenceT], token_ids: Sequence[int]) -> Opened | None:
        """Begin an empty session after what is cached of its text; the answer to its ``Open``, if that is due.

        Nothing is taken from the cache when the positions of the prompt have to be computed for their logprobs.
        """
        num_cached_tokens = 0
        if session.open.num_prompt_logprobs is None:
            num_cached_tokens = self._store.adopt_prefix(session.sequence, token_ids)
        if session.is_told_opened:
            return None
        session.is_told_opened = True
        return Opened(session.open.session, session.open.generation, num_cached_tokens)

    def commit(self, session: Session[SequenceT], length: int) -> None:
        """The first ``length`` tokens of a session are computed and final."""
        self._store.commit(session.sequence, length)

    def release(self, link_id: int, command: Release) -> bool:
        """End a session; False when the item is an old one."""
        books = self._books_of(link_id)
        if command.generation < books.newest_generation(command.session):
            return False
        self._forget(books, command.session)
        self._bury(books, command.session, command.generation)
        return True

    def fail(self, link_id: int, session: int, generation: int, error: OutriderError) -> SessionFailed:
        """End a session that cannot go on; its pages are free."""
        books = self._books_of(link_id)
        self._forget(books, session)
        self._bury(books, session, generation)
        return SessionFailed(session, generation, type(error).__name__, str(error), error.field)

    def sessions(self) -> list[Session[SequenceT]]:
        """All that are open."""
        return [session for books in self._links.values() for session in books.sessions.values()]

    def expire(self, link_id: int, session: int) -> None:
        """End a session without a tombstone: what comes for it later is answered with ``SessionLost``."""
        self._forget(self._books_of(link_id), session)

    def drop_link(self, link_id: int) -> None:
        """End all sessions of a link and forget its tombstones."""
        books = self._links.pop(link_id, None)
        if books is not None:
            for session in list(books.sessions):
                self._forget(books, session)

    def _books_of(self, link_id: int) -> _LinkBooks[SequenceT]:
        books = self._links.get(link_id)
        if books is None:
            self._links[link_id] = books = _LinkBooks()
        return books

    def _is_full(self, books: _LinkBooks[SequenceT]) -> bool:
        most = self._limits.sessions.max_per_link
        return most is not None and len(books.sessions) >= most

    def refuse(self, session: Session[SequenceT], reason: str) -> Refused:
        """End a session that has no room to begin."""
        books = self._books_of(session.link_id)
        self._forget(books, session.open.session)
        return self._refuse(books, session.open.session, session.generation, reason)

    def preempt(self, session: Session[SequenceT]) -> Preempted:
        """End a session whose pages are needed for others."""
        books, number = self._books_of(session.link_id), session.open.session
        self._forget(books, number)
        self._bury(books, number, session.generation)
        return Preempted(number, session.generation, self._limits.retry_after_ms)

    def _refuse(self, books: _LinkBooks[SequenceT], session: int, generation: int, reason: str) -> Refused:
        self._bury(books, session, generation)
        return Refused(session, generation, self._limits.retry_after_ms, reason)

    def _open_twice(self, link_id: int, books: _LinkBooks[SequenceT], command: Open) -> SessionFailed | None:
        known = books.sessions.get(command.session)
        if known is None or known.open == command:
            return None
        error = InvalidRequestError("session", f"{command.session} is open with this generation and other parameters")
        return self.fail(link_id, command.session, command.generation, error)

    def _forget(self, books: _LinkBooks[SequenceT], session: int) -> None:
        known = books.sessions.pop(session, None)
        if known is not None:
            self._store.release(known.sequence)

    @staticmethod
    def _bury(books: _LinkBooks[SequenceT], session: int, generation: int) -> None:
        books.tombstones[session] = generation
        books.tombstones.move_to_end(session)
        if len(books.tombstones) > MAX_TOMBSTONES:
            books.tombstones.popitem(last=False)


class IdleSessions(Generic[SequenceT]):
    """Sessions for which nothing comes for too long. ``end_all`` is due when ``next_check_s`` is 0."""

    def __init__(
        self,
        session_table: SessionTable[SequenceT],
        *,
        is_busy: Callable[[SessionKey], bool],
        end: Callable[[SessionKey], None],
        clock: Callable[[], int],
    ) -> None:
        """``is_busy`` says whether a session waits for an answer; ``clock`` gives nanoseconds."""
        self._session_table = session_table
        timeout_s = session_table.session_limits.idle_timeout_s
        self._timeout_ns = None if timeout_s is None else round(timeout_s * _NANOSECONDS)
        self._is_busy, self._end, self._clock = is_busy, end, clock
        self._next_ns = 0

    @property
    def next_check_s(self) -> float | None:
        """Seconds until the next look; None while there are no sessions."""
        if self._timeout_ns is None or not len(self._session_table):
            return None
        return max(0, self._next_ns - self._clock()) / _NANOSECONDS

    def end_all(self) -> None:
        """End the sessions that have been idle for the timeout."""
        if self._timeout_ns is None:
            return
        now = self._clock()
        self._next_ns = now + self._timeout_ns // _CHECKS_PER_TIMEOUT
        idle = []
        for session in self._session_table.sessions():
            if self._is_busy(session.key):
                session.used_ns = now
            elif now - session.used_ns >= self._timeout_ns:
                idle.append(session.key)
        for key in idle:
            self._end(key)
        if idle:
            seconds = self._timeout_ns / _NANOSECONDS
            _log.info("%d sessions of which nothing was heard for %g s were released", len(idle), seconds)
