"""The books of a toy service: sessions by length, generations, pages; what every toy answers alike.

Keeps the rules of the seam in their plainest form. One ``ToyCore`` is one link's worth of sessions and is driven by
hand: ``core.handle(commands)`` gives the answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from outrider.ports import (
    EventBatch,
    Extend,
    ForwardReport,
    ItemTiming,
    Open,
    Preempted,
    Prepare,
    Refused,
    Release,
    Score,
    SessionFailed,
    SessionLost,
)
from outrider.prefix_hash import prefix_hash
from outrider.stalls import NO_STALL, Stall

EventT = TypeVar("EventT")


@dataclass
class Faults:
    """Faults from now on; tests set and clear these while things run."""

    unreachable: bool = False
    """``describe`` and ``attach`` raise UnavailableError."""
    silent: bool = False
    """Commands arrive and are not answered; the sessions do not see them either."""
    hold: bool = False
    """Slow: answers are ready and wait for ``release_held``."""
    refuse: int = 0
    """Number of the next Opens that are refused."""
    lose: int = 0
    """Number of the next items that find their session lost."""
    fail: int = 0
    """Number of the next items that fail their session."""
    preempt: int = 0
    """Number of the next items that find their session preempted."""
    stall: Stall = NO_STALL
    """Description that links give."""
    stale: bool = False
    """Send one of an older generation, with other content, before each answer."""


@dataclass
class Books:
    """State that the links of one toy service share."""

    faults: Faults
    page_size: int
    num_pages: int
    pages_taken: int = 0
    num_forwards: int = 0

    @property
    def num_pages_free(self) -> int:
        return self.num_pages - self.pages_taken


@dataclass
class ToySession:
    open: Open
    generation: int
    pages: int
    tokens: list[int] = field(default_factory=list)
    """Tokens of which the service holds KV."""


class ToyCore(Generic[EventT]):
    """The sessions of one link."""

    retry_after_ms = 20

    def __init__(self, books: Books, vocab_size: int) -> None:
        self.books = books
        self.sessions: dict[int, ToySession] = {}
        self.newest: dict[int, int] = {}
        """Newest generation of every session ever seen: it has ended once it is not in ``sessions``."""
        self._vocab_size = vocab_size

    def handle(self, commands: Sequence[Any]) -> EventBatch[EventT]:
        """Take in one message and answer it; all items share one forward."""
        if self.books.faults.silent:
            return EventBatch(())
        events: list[Any] = []
        num_tokens = sum(self._handle_one(command, events) for command in commands)
        if not num_tokens:
            return EventBatch(tuple(events))
        timing = ItemTiming(1_000, 2_000, 3_000, 0, 6_000)
        return EventBatch(tuple(events), self._report(num_tokens, len(commands)), (timing,) * len(events))

    def release_all(self) -> None:
        """End of the link's sessions when it closes."""
        for session in list(self.sessions):
            self._drop(session)
        self.newest.clear()

    def answer(self, session: ToySession, item: Any) -> EventT:
        """The answer to an item whose committed tokens ``session.tokens`` now ends with; the toys differ here."""
        raise NotImplementedError

    def _handle_one(self, command: Any, events: list[Any]) -> int:
        """Number of tokens that went through the model."""
        if command.generation < self.newest.get(command.session, -1):
            return 0
        if isinstance(command, Open):
            events += self._open(command)
        elif isinstance(command, Release):
            self._bury(command)
        elif not isinstance(command, Prepare):  # which may be ignored
            return self._handle_item(command, events)
        return 0

    def _open(self, command: Open) -> list[Refused]:
        self._bury(command)
        pages = -(-command.max_length // self.books.page_size)
        if self._is_refused() or pages > self.books.num_pages_free:
            return [Refused(command.session, command.generation, self.retry_after_ms, f"{pages} pages are not free")]
        self.books.pages_taken += pages
        self.sessions[command.session] = ToySession(command, command.generation, pages)
        return []

    def _is_refused(self) -> bool:
        refused = self.books.faults.refuse > 0
        self.books.faults.refuse -= refused
        return refused

    def _handle_item(self, item: Extend | Score, events: list[Any]) -> int:
        session = self.sessions.get(item.session)
        if session is None:
            if item.session not in self.newest:
                events.append(SessionLost(item.session, item.generation, "the session is not open on this link"))
            return 0
        self.newest[item.session] = session.generation = item.generation
        trouble = self._trouble(session, item)
        if trouble is not None:
            events.append(trouble)
            return 0
        del session.tokens[item.num_kept_tokens :]
        session.tokens += item.token_ids
        if self.books.faults.stale:
            events.append(self._stale_answer(session, item))
        events.append(self.answer(session, item))
        return len(item.token_ids)

    def _trouble(self, session: ToySession, item: Extend | Score) -> SessionLost | SessionFailed | Preempted | None:
        faults = self.books.faults
        if faults.preempt > 0:
            faults.preempt -= 1
            self._drop(item.session)
            return Preempted(item.session, item.generation, self.retry_after_ms)
        if faults.lose > 0:
            faults.lose -= 1
            self._drop(item.session)
            del self.newest[item.session]
            return SessionLost(item.session, item.generation, "lost as told")
        if faults.fail > 0:
            faults.fail -= 1
            return self._fail(item, "NonFiniteLogitsError", "logits are not finite, as told", "")
        if item.num_kept_tokens > len(session.tokens):
            return SessionLost(item.session, item.generation, f"only {len(session.tokens)} tokens are held")
        if prefix_hash(session.tokens[: item.num_kept_tokens], session.open.prefix_hash_key) != item.prefix_hash:
            return SessionLost(item.session, item.generation, "another text")
        return self._bad_item(session, item)

    def _bad_item(self, session: ToySession, item: Extend | Score) -> SessionFailed | None:
        if isinstance(item, Score) and not item.token_ids:
            return self._fail(item, "InvalidRequestError", "token_ids: at least one is needed", "token_ids")
        if any(not 0 <= token_id < self._vocab_size for token_id in item.token_ids):
            return self._fail(item, "InvalidRequestError", "token_ids: an id out of range", "token_ids")
        drafts = len(item.draft_token_ids) if isinstance(item, Score) else 0
        if item.num_kept_tokens + len(item.token_ids) + drafts > session.open.max_length:
            return self._fail(item, "InvalidRequestError", "token_ids: beyond max_length", "token_ids")
        return None

    def _fail(self, item: Extend | Score, code: str, message: str, field_: str) -> SessionFailed:
        self._drop(item.session)
        return SessionFailed(item.session, item.generation, code, message, field_)

    def _stale_answer(self, session: ToySession, item: Extend | Score) -> Any:
        older = ToySession(session.open, item.generation - 1, 0, [*session.tokens[:-1], 0])
        return self.answer(older, item)

    def _bury(self, command: Open | Release) -> None:
        self._drop(command.session)
        self.newest[command.session] = command.generation

    def _drop(self, session: int) -> None:
        known = self.sessions.pop(session, None)
        if known is not None:
            self.books.pages_taken -= known.pages

    def _report(self, num_tokens: int, batch_size: int) -> ForwardReport:
        self.books.num_forwards += 1
        return ForwardReport(1_000, 2_000, 3_000, 6_000, batch_size, num_tokens, self.books.num_pages_free)
