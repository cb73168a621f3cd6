"""The rules of sessions that every service keeps: generations, tombstones, kept lengths, reservations.

Owns which sessions are open on which link, the newest generation of each, and what text each holds. Refuses to know
what is computed over that text, by whom, and where its KV lies: texts are kept by a ``SequenceStore``. Plain Python.

A session that was released, refused or has failed leaves a tombstone, and items for it are ignored, because they
crossed the answer on the wire. Only ``Open`` with a higher generation brings it back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from outrider.errors import InvalidRequestError, OutriderError
from outrider.ports import Open, Opened, Preempted, Refused, Release, SessionFailed, SessionLost
from outrider.prefix_hash import MAX_KEY_BYTES, PrefixHash
from outrider.types import JudgingRule

MAX_TOMBSTONES = 65_536
"""Tombstones kept for one link, the latest: an item can cross an answer only for a short while."""


class TokenSequence(Protocol):
    """Tokens that a session holds."""

    @property
    def length(self) -> int:
        """How many."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Which."""
        ...


SequenceT = TypeVar("SequenceT", bound=TokenSequence)
SequenceT_inv = TypeVar("SequenceT_inv", bound=TokenSequence)


class SequenceStore(Protocol[SequenceT_inv]):
    """Keeps texts; ``outrider.kv_cache.KVCacheManager`` is one."""

    def open(self, max_length: int, cache_salt: str = "", prefix_hash_key: bytes = b"") -> SequenceT_inv:
        """An empty text that can grow to ``max_length``."""
        ...

    def adopt_prefix(self, sequence: SequenceT_inv, token_ids: Sequence[int]) -> int:
        """Give an empty text what is cached of ``token_ids``, always less than all; how many tokens that is."""
        ...

    def num_pages(self, sequence: SequenceT_inv) -> int:
        """KV pages that it holds."""
        ...

    def commit(self, sequence: SequenceT_inv, length: int) -> None:
        """The first ``length`` tokens are computed and final: others may share them."""
        ...

    def truncate(self, sequence: SequenceT_inv, length: int) -> None:
        """Keep the first ``length`` tokens."""
        ...

    def prefix_hash(self, sequence: SequenceT_inv, length: int) -> PrefixHash:
        """Prefix hash of the first ``length`` tokens."""
        ...

    def release(self, sequence: SequenceT_inv) -> None:
        """Give back what it takes."""
        ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many sessions one link may have open, and how long one may stay unused."""

    max_per_link: int | None = None
    """More are refused; None: any number."""
    idle_timeout_s: float | None = None
    """A session for which nothing comes for so long ends; None: never."""


UNBOUNDED = SessionLimits()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a service can take."""

    vocab_size: int
    """Token ids are below this; 0: any."""
    max_model_len: int
    trims: bool
    """A longer session is taken all the same, and kept as far as it fits (a draft); otherwise it fails."""
    max_cached_tokens: int = 0
    """Tokens that the whole KV cache has room for; 0: any number."""
    retry_after_ms: int = 200
    """What ``Refused`` and ``Preempted`` say."""
    sessions: SessionLimits = UNBOUNDED

    @property
    def max_length(self) -> int:
        """The longest session that is kept."""
        return min(self.max_model_len, self.max_cached_tokens or self.max_model_len)


SessionKey = tuple[int, int]


@dataclass(slots=True)
class Session(Generic[SequenceT]):
    """One open session."""

    link_id: int
    open: Open
    sequence: SequenceT
    reserved_length: int
    """Tokens that ``sequence`` can grow to."""
    generation: int
    """The newest item's."""
    used_ns: int = 0
    """When something last came for it."""
    is_told_opened: bool = False
    """Whether its ``Open`` was answered with ``Opened``."""
    lookahead_credit: int = 0
    """Plain steps that may yet be computed before they are asked for: what is left of a ``Prepare``."""
    executor_state: object = None
    """What the executor derives from ``open`` at the session's first item; it ends with the session."""
    key: SessionKey = field(init=False)
    """Its link and its number there; asked for many times an item."""
    age: tuple[int, str, int, int] = field(init=False)
    """Compares less than that of a younger session."""

    def __post_init__(self) -> None:
        self.key = self.link_id, self.open.session
        self.age = self.open.arrival_ns, self.open.request_id, *self.key


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


def check_open(command: Open, limits: Limits) -> None:
    """Raise ``InvalidRequestError`` naming the field for which a session cannot be opened here."""
    _require(command.max_length >= 1, "max_length", "must be at least 1")
    if not limits.trims:
        _require(command.max_length <= limits.max_model_len, "max_length", f"must be at most {limits.max_model_len}")
        room = limits.max_cached_tokens
        _require(
            not room or command.max_length <= room, "max_length", f"must be at most {room}: all that the pages hold"
        )
    _require(0 <= command.prompt_length <= command.max_length, "prompt_length", "must be from 0 to max_length")
    highest = limits.vocab_size or math.inf
    _require(1 <= command.num_token_ids <= highest, "num_token_ids", f"must be from 1 to {highest}")
    _require(0 <= command.seed < 2**64, "seed", "must be from 0 to 2**64 - 1")
    _require(len(command.prefix_hash_key) <= MAX_KEY_BYTES, "prefix_hash_key", f"has at most {MAX_KEY_BYTES} bytes")
    is_greedy = command.judging_rule is JudgingRule.GREEDY
    _require(is_greedy == (command.sampling.temperature == 0), "judging_rule", "greedy goes with temperature 0 alone")
    _require((command.num_logprobs or 0) >= 0, "num_logprobs", "must not be negative")
    _require((command.num_prompt_logprobs or 0) >= 0, "num_prompt_logprobs", "must not be negative")
    _check_sampling(command, limits.vocab_size)


def _check_sampling(command: Open, vocab_size: int) -> None:
    sampling = command.sampling
    _require(math.isfinite(sampling.temperature), "temperature", "must be a number")
    _require(sampling.temperature >= 0, "temperature", "must not be negative")
    _require(0 < sampling.top_p <= 1, "top_p", "must be above 0 and at most 1")
    _require(0 <= sampling.min_p <= 1, "min_p", "must be from 0 to 1")
    _require(sampling.top_k >= -1, "top_k", "must be at least -1")
    _require(sampling.repetition_penalty > 0, "repetition_penalty", "must be above 0")
    _require(all(math.isfinite(bias) for _, bias in sampling.logit_bias), "logit_bias", "must be numbers")
    check_ids("logit_bias", (token_id for token_id, _ in sampling.logit_bias), vocab_size)
    check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    check_ids("bad_words", (token_id for word in sampling.bad_words for token_id in word), vocab_size)
    check_ids("eos_token_ids", command.eos_token_ids, vocab_size)
    check_ids("banned_token_ids", command.banned_token_ids, vocab_size)


def check_ids(name: str, token_ids: Iterable[int], limit: int) -> None:
    """Raise ``InvalidRequestError`` unless every id is from 0 to ``limit`` - 1; a limit of 0 is none."""
    ids = token_ids if isinstance(token_ids, tuple) else tuple(token_ids)
    if not ids or (min(ids) >= 0 and (not limit or max(ids) < limit)):  # without a loop of ours: they may be many
        return
    wrong = next(token_id for token_id in ids if token_id < 0 or (limit and token_id >= limit))
    bounds = f"from 0 to {limit - 1}" if limit else "at least 0"
    raise InvalidRequestError(name, f"token id {wrong} must be {bounds}")


def _require(holds: bool, name: str, message: str) -> None:
    if not holds:
        raise InvalidRequestError(name, message)
