"""A scripted target and draft over toy languages: ``ports.Target`` and ``ports.Draft`` for tests.

``ToyTarget(rows, vocab_size)`` and ``ToyDraft(rows, vocab_size)`` take a pure function from tokens to probabilities.
Two ways to drive them:

* ``port.core()`` is one link's sessions without an event loop: ``core.handle(commands) -> EventBatch``.
* ``await port.attach()`` is a real ``ports.Link``; answers come in a later turn of the event loop.

``port.faults`` says what goes wrong (silent, slow, refusing, losing, stale answers, unreachable), ``break_links``
breaks what is attached, ``link.push`` sends any event unasked. ``num_pages_free`` is for accounting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from outrider import __version__
from outrider.batched import one_by_one
from outrider.errors import UnavailableError
from outrider.ports import DraftCommand, DraftEvent, EventBatch, TargetCommand, TargetEvent
from outrider.randomness.streams import Stream
from outrider.stalls import Stall
from outrider.types import ModelDescription
from tests.support.toy_language import Rows, ToyLanguage
from tests.support.toy_models import Misreport, ToyDraftCore, ToyTargetCore
from tests.support.toy_sessions import Books, Faults, ToyCore

__all__ = ["Faults", "ScriptedLink", "ToyDraft", "ToyTarget", "random_rows", "reversed_rows"]

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

_NO_TOKENIZER: dict[str, bytes] = {}


def random_rows(vocab_size: int, *, seed: int = 0, spread: float = 1.5, context: int = 3) -> Rows:
    """A language in which each token depends on the ``context`` before it; ``spread`` 0 is uniform."""

    def rows(tokens: tuple[int, ...]) -> np.ndarray:  # -> [V]
        words = [seed, *(token + 1 for token in tokens[-context:])]
        logits = spread * np.random.default_rng(words).standard_normal(vocab_size)
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())

    return rows


def reversed_rows(rows: Rows) -> Rows:
    """A bad draft: the ranking of ``rows`` upside down."""

    def upside_down(tokens: tuple[int, ...]) -> np.ndarray:  # -> [V]
        row = rows(tokens)
        flipped = np.empty_like(row)
        flipped[np.argsort(row)] = np.sort(row)[::-1]
        return flipped

    return upside_down


class ScriptedLink(Generic[CommandT, EventT]):
    """``ports.Link`` to one ``ToyCore``."""

    def __init__(self, core: ToyCore[EventT]) -> None:
        self.core = core
        self.sent: list[tuple[CommandT, ...]] = []
        """Every message as it came."""
        self.is_closed = False
        self._held: deque[EventBatch[EventT]] = deque()
        self._ready: deque[EventBatch[EventT]] = deque()
        self._changed = asyncio.Event()
        self._broken: str | None = None

    @property
    def num_pages_free(self) -> int:
        return self.core.books.num_pages_free

    @property
    def stall(self) -> Stall:
        return self.core.books.faults.stall

    def send(self, commands: Sequence[CommandT]) -> None:
        if self.is_closed or self._broken is not None:
            raise UnavailableError(self._broken or "the link is closed")
        items = one_by_one(commands)
        self.sent.append(tuple(items))
        batch = self.core.handle(items)
        if batch.events or batch.report is not None:
            (self._held if self.core.books.faults.hold else self._ready).append(batch)
            self._changed.set()

    async def events(self) -> AsyncIterator[EventBatch[EventT]]:
        while True:
            while self._ready:
                yield self._ready.popleft()
            if self._broken is not None:
                raise UnavailableError(self._broken)
            if self.is_closed:
                return
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        self.is_closed = True
        self.core.release_all()
        self._changed.set()

    def push(self, *events: EventT) -> None:
        """An event that nobody asked for."""
        self._ready.append(EventBatch(events))
        self._changed.set()

    def release_held(self) -> None:
        self._ready.extend(self._held)
        self._held.clear()
        self._changed.set()

    def break_off(self, reason: str) -> None:
        """The link is gone, and with it its sessions."""
        self._broken = reason
        self._ready.clear()
        self.core.release_all()
        self._changed.set()


@dataclass(frozen=True)
class _Shape:
    """Base of the toy services."""

    vocab_size: int
    num_token_ids: int | None = None
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    page_size: int = 4
    num_pages: int = 1_000_000
    tokenizer_hash: str = "toy"

    def describe(self, role: str) -> ModelDescription:
        return ModelDescription(
            role=role,
            model_name=f"toy-{role}",
            architecture="Toy",
            vocab_size=self.vocab_size,
            num_token_ids=self.num_token_ids or self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            dtype="float64",
            device="cpu",
            page_size=self.page_size,
            num_pages=self.num_pages,
            tokenizer_hash=self.tokenizer_hash,
            version=__version__,
        )


class _ToyPort(Generic[CommandT, EventT]):
    def __init__(self, rows: Rows, shape: _Shape, role: str, tokenizer_files: dict[str, bytes]) -> None:
        self.faults = Faults()
        self.links: list[ScriptedLink[CommandT, EventT]] = []
        """Every link ever attached."""
        self.description = replace(shape.describe(role), tokenizer_files=tokenizer_files)
        self._language = ToyLanguage(rows, shape.vocab_size)
        self._books = Books(self.faults, shape.page_size, shape.num_pages)

    @property
    def num_pages_free(self) -> int:
        return self._books.num_pages_free

    @property
    def num_forwards(self) -> int:
        """Messages that put at least one token through the model."""
        return self._books.num_forwards

    @property
    def link(self) -> ScriptedLink[CommandT, EventT]:
        """The newest."""
        return self.links[-1]

    def core(self) -> ToyCore[EventT]:
        """The sessions of one link, to be driven by hand."""
        raise NotImplementedError

    async def describe(self) -> ModelDescription:
        self._require_reachable()
        return self.description

    async def attach(self) -> ScriptedLink[CommandT, EventT]:
        self._require_reachable()
        self.links.append(ScriptedLink(self.core()))
        return self.link

    def break_links(self, reason: str = "broken as told") -> None:
        for link in self.links:
            if not link.is_closed:
                link.break_off(reason)

    def release_held(self) -> None:
        for link in self.links:
            link.release_held()

    def _require_reachable(self) -> None:
        if self.faults.unreachable:
            raise UnavailableError(f"the toy {self.description.role} cannot be reached")


class ToyTarget(_ToyPort[TargetCommand, TargetEvent]):
    """``ports.Target`` over a toy language."""

    def __init__(
        self, rows: Rows, vocab_size: int, *, tokenizer_files: dict[str, bytes] = _NO_TOKENIZER, **shape: Any
    ) -> None:
        super().__init__(rows, _Shape(vocab_size, **shape), "target", tokenizer_files)

    def core(self) -> ToyTargetCore:
        return ToyTargetCore(self._books, self._language)


class ToyDraft(_ToyPort[DraftCommand, DraftEvent]):
    """``ports.Draft`` over a toy language.

    The negative controls: ``proposal_stream`` RESIDUAL shares the randomness of proposal and residual, ``misreport``
    gives evidence that is not what was drawn from.
    """

    def __init__(
        self,
        rows: Rows,
        vocab_size: int,
        *,
        support_mass: float = 0.999,
        support_limit: int = 1024,
        proposal_stream: Stream = Stream.PROPOSAL,
        misreport: Misreport | None = None,
        **shape: Any,
    ) -> None:
        super().__init__(rows, _Shape(vocab_size, **shape), "draft", _NO_TOKENIZER)
        self._support_mass = support_mass
        self._support_limit = support_limit
        self._proposal_stream = proposal_stream
        self._misreport = misreport

    def core(self) -> ToyDraftCore:
        return ToyDraftCore(
            self._books,
            self._language,
            max_model_len=self.description.max_model_len,
            support_mass=self._support_mass,
            support_limit=self._support_limit,
            proposal_stream=self._proposal_stream,
            misreport=self._misreport,
        )
