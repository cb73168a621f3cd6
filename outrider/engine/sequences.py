"""The table of KV sequences: what text each holds, in which pages, and how it grows, shrinks and forks.

Owns lengths, token ids, page tables and the page copies that are due before the next forward, in plain Python. Refuses
to know tensors, models and sessions.

Pages are taken when a sequence is opened or forked, all it may ever need; nothing later can run out. They are taken as
one run of neighbours where possible, because a kernel reads such a run without gathering. A page that two sequences
hold is copied by the first that writes to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from typing import TypeAlias

from outrider.engine.pages import PagePool
from outrider.errors import IntegrityError, InvalidRequestError
from outrider.types import extend_prefix_hash, running_hashes

PageCopy = tuple[int, int]
"""(source page, destination page)."""
Pages: TypeAlias = "array[int]"
"""Page numbers of 32 bits each, as a device reads them: many are put together for every forward."""


def pages_in(numbers: Iterable[int]) -> Pages:
    """These pages."""
    return array("i", numbers)


class Sequence:
    """One KV sequence; changed by its ``SequenceTable`` alone."""

    __slots__ = ("_prefix_hashes", "is_open", "max_length", "page_table", "token_ids")

    def __init__(self, max_length: int, page_table: Pages, token_ids: list[int], prefix_hashes: list[int]) -> None:
        self.max_length = max_length
        """Tokens for which pages are reserved."""
        self.page_table = page_table
        """Every reserved page, in order: position p lies in ``page_table[p // page_size]``."""
        self.token_ids = token_ids
        """The tokens whose KV is held."""
        self.is_open = True
        self._prefix_hashes = prefix_hashes  # of the lengths 0, 1, ... as far as anybody asked

    @property
    def length(self) -> int:
        """Tokens whose KV is held."""
        return len(self.token_ids)

    @property
    def reserved_pages(self) -> int:
        """Pages set aside for this sequence, shared ones included."""
        return len(self.page_table)

    def prefix_hash(self, length: int) -> int:
        """The running hash of the first ``length`` tokens; each token is hashed once in its life."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a prefix of {length} tokens of a sequence of {self.length}")
        hashes = self._prefix_hashes
        if len(hashes) <= length:
            hashes += running_hashes(hashes[-1], self.token_ids[len(hashes) - 1 : length])
        return hashes[length]

    def forget_after(self, length: int) -> None:
        """Drop the tokens from ``length`` on; for the table's use."""
        del self.token_ids[length:]
        del self._prefix_hashes[length + 1 :]

    def copy(self, max_length: int, page_table: Pages) -> Sequence:
        """The same text in other pages; for the table's use."""
        return Sequence(max_length, page_table, list(self.token_ids), list(self._prefix_hashes))


class SequenceTable:
    """All sequences of one model, over one pool of pages."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._sequences: set[Sequence] = set()
        # Destination -> source, both physical pages. All sources are read before any destination is written.
        self._pending_copies: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, max_length: int) -> Sequence:
        """An empty sequence that can grow to ``max_length`` tokens without failing; ``OutOfPagesError`` and no
        change if there is no room.
        """
        self._require_length(max_length)
        pages = self.pool.allocate(self.pool.pages_for(max_length))
        return self._add(Sequence(max_length, pages_in(pages), [], [0]))

    def extend(self, sequence: Sequence, token_ids: TokenIds[int]) -> list[int]:
        """Append tokens; returns the slot of each. A shared page that is about to be written is exchanged for a
        copy first.
        """
        self.require_room(sequence, len(token_ids))
        return self.extend_checked(sequence, token_ids)

    def extend_checked(self, sequence: Sequence, token_ids: TokenIds[int]) -> list[int]:
        """``extend`` for which ``require_room`` has found room."""
        held, size = sequence.token_ids, self.pool.page_size
        start, count = len(held), len(token_ids)
        if not count:
            return []
        if self.pool.has_shared:
            for index in range(start // size, self.pool.pages_for(start + count)):
                self._own_page(sequence, index, keeps_content=index * size < start)
        held += token_ids
        table, (index, offset) = sequence.page_table, divmod(start, size)
        if offset + count <= size:  # slots of one page are neighbours
            first = table[index] * size + offset
            return list(range(first, first + count))
        return [table[position // size] * size + position % size for position in range(start, start + count)]

    def require_room(self, sequence: Sequence, count: int) -> None:
        """Raise unless the sequence is open and ``count`` tokens fit in its reservation; changes nothing."""
        self._require_open(sequence)
        length = len(sequence.token_ids)
        if length + count > sequence.max_length:
            raise InvalidRequestError(
                "token_ids", f"{count} more tokens after {length} pass the {sequence.max_length} that were reserved"
            )

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first ``length`` tokens. The reservation stays."""
        self._require_open(sequence)
        if not 0 <= length <= sequence.length:
            raise InvalidRequestError("length", f"cannot keep {length} tokens of {sequence.length}")
        sequence.forget_after(length)

    def amend(self, sequence: Sequence, length: int, token_ids: TokenIds[int]) -> None:
        """What was appended after ``length`` tokens were ``token_ids``, as many or fewer, whatever ids were given then.
        What is past them goes.
        """
        self._require_open(sequence)
        if not 0 <= length <= length + len(token_ids) <= sequence.length:
            raise InvalidRequestError(
                "length", f"{len(token_ids)} tokens after {length} were not appended to a sequence of {sequence.length}"
            )
        sequence.forget_after(length)
        sequence.token_ids.extend(token_ids)

    def fork(self, sequence: Sequence, max_length: int) -> tuple[Sequence, list[PageCopy]]:
        """A second sequence with the same text: full pages are shared, the partial one is copied.

        The copies are returned for the caller to see; the next forward performs them. Like ``open``, it takes what the
        fork may ever need or raises ``OutOfPagesError`` and changes nothing.
        """
        self._require_open(sequence)
        self._require_length(max_length)
        if max_length < sequence.length:
            raise InvalidRequestError(
                "max_length", f"{max_length} is less than the {sequence.length} tokens to be forked"
            )
        self.pool.require(self.pool.pages_for(max_length))
        num_full = sequence.length // self.pool.page_size
        shared = sequence.page_table[:num_full]
        self.pool.share(shared)
        own = pages_in(self.pool.allocate(self.pool.pages_for(max_length) - num_full))
        copies: list[PageCopy] = []
        if sequence.length % self.pool.page_size:
            copies.append((sequence.page_table[num_full], own[0]))
            self._schedule_copy(*copies[0])
        return self._add(sequence.copy(max_length, shared + own)), copies

    def release(self, sequence: Sequence) -> None:
        """Give the sequence's pages back. It must not be used again."""
        self._require_open(sequence)
        sequence.is_open = False
        self._sequences.remove(sequence)
        self.pool.release(sequence.page_table)
        for page in sequence.page_table:
            if not self.pool.is_held(page):
                self._pending_copies.pop(page, None)

    def prefix_hash(self, sequence: Sequence, length: int) -> int:
        """The running hash (``outrider.types.extend_prefix_hash``) of the sequence's first ``length`` tokens; of
        none it is 0.
        """
        self._require_open(sequence)
        return sequence.prefix_hash(length)

    def pages_of(self, sequence: Sequence) -> Pages:
        """The pages of what the sequence holds, in order."""
        return sequence.page_table[: self.pool.pages_for(len(sequence.token_ids))]

    def pending_copies(self) -> list[PageCopy]:
        """Copies that are due: all sources are to be read before any destination is written."""
        return [(source, destination) for destination, source in self._pending_copies.items()]

    def confirm_copies(self) -> None:
        """The pending copies were performed."""
        self._pending_copies.clear()

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` naming what is wrong, unless pages, reservations and lengths add up."""
        self.pool.check_integrity(sequence.page_table for sequence in self._sequences)
        for sequence in self._sequences:
            if not sequence.is_open:
                raise IntegrityError("a released sequence is still in the table")
            if sequence.reserved_pages != self.pool.pages_for(sequence.max_length):
                raise IntegrityError(f"{sequence.reserved_pages} pages are reserved for {sequence.max_length} tokens")
            if sequence.length > sequence.max_length:
                raise IntegrityError(f"a sequence of {sequence.length} tokens has room for {sequence.max_length}")
            if sequence.prefix_hash(sequence.length) != extend_prefix_hash(0, sequence.token_ids):
                raise IntegrityError("a sequence's running hash is not its text's")
        for destination in self._pending_copies:
            if not self.pool.is_held(destination):
                raise IntegrityError(f"a copy is due to page {destination}, which is free")

    def _add(self, sequence: Sequence) -> Sequence:
        self._sequences.add(sequence)
        return sequence

    def _own_page(self, sequence: Sequence, index: int, *, keeps_content: bool) -> None:
        page = sequence.page_table[index]
        if not self.pool.is_shared(page):
            return
        sequence.page_table[index] = self.pool.exchange_shared(page)
        if keeps_content:
            self._schedule_copy(page, sequence.page_table[index])

    def _schedule_copy(self, source: int, destination: int) -> None:
        # A source that itself awaits a copy holds nothing yet: copy from where its content will come.
        self._pending_copies[destination] = self._pending_copies.get(source, source)

    def _require_open(self, sequence: Sequence) -> None:
        if sequence not in self._sequences:
            raise InvalidRequestError("sequence", "was released, or belongs to another table")

    @staticmethod
    def _require_length(max_length: int) -> None:
        if max_length < 1:
            raise InvalidRequestError("max_length", f"must be at least 1, not {max_length}")
