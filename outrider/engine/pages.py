"""The pool of KV pages: which are free, and how many sequences hold each of the others.

Owns page numbers and their reference counts in plain Python. Refuses to know tensors, devices, tokens and sequences.

A page held by n sequences is backed by n pages: one in use and n - 1 kept back, because each holder but the last may
have to write to it and then needs a copy of its own. So a copy on write can never find the pool empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from outrider.errors import IntegrityError, OutOfPagesError

_FREE = 1
_HELD = 0


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one token, not {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # One byte a page, so that a run of free pages is found by a substring search.
        self._states = bytearray([_FREE]) * num_pages
        self._num_unheld = num_pages
        self._num_kept_back = 0
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that may still be given out; those kept back for copies are not among them."""
        return self._num_unheld - self._num_kept_back

    @property
    def num_used(self) -> int:
        """Pages in use or kept back for the copies that holders of shared pages may need."""
        return self.num_pages - self.num_free

    @property
    def has_shared(self) -> bool:
        """Whether any page has more than one holder."""
        return self._num_kept_back > 0

    def pages_for(self, length: int) -> int:
        """How many pages hold ``length`` tokens."""
        return -(-length // self.page_size)

    def require(self, count: int) -> None:
        """Raise ``OutOfPagesError`` unless ``count`` pages are free; changes nothing."""
        if count > self.num_free:
            raise OutOfPagesError(f"{count} KV pages are needed and {self.num_free} of {self.num_pages} are free")

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages, neighbours in one rising run where there is one; ``OutOfPagesError`` and no change
        if too many.
        """
        self.require(count)
        pages = self._find(count)
        for page in pages:
            self._states[page] = _HELD
            self._references[page] = 1
        self._num_unheld -= count
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each page, which keeps one page back for each; ``OutOfPagesError`` and no change if too
        few are free.
        """
        self._require_held(pages)
        self.require(len(pages))
        for page in pages:
            self._references[page] += 1
        self._num_kept_back += len(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one holder of each page; a page without holders is free."""
        self._require_held(pages)
        for page in pages:
            self._drop_holder(page)

    def is_shared(self, page: int) -> bool:
        """Whether writing to this page would be seen by another holder."""
        return self._references[page] > 1

    def is_held(self, page: int) -> bool:
        """Whether any sequence holds this page."""
        return self._references[page] > 0

    def exchange_shared(self, page: int) -> int:
        """Give up one hold on a shared page for a page of one's own, out of those kept back; cannot run out."""
        if not self.is_shared(page):
            raise IntegrityError(f"page {page} has {self._references[page]} holders: only a shared page is exchanged")
        self._drop_holder(page)
        return self.allocate(1)[0]

    def check_integrity(self, page_tables: Iterable[Sequence[int]]) -> None:
        """Raise ``IntegrityError`` unless the books agree with these page tables, which must be all there are."""
        holders: Counter[int] = Counter()
        for table in page_tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a page table names a page twice: {list(table)}")
            holders.update(table)
        self._check_holders(holders)
        self._check_counts()

    def _find(self, count: int) -> list[int]:
        start = self._states.find(bytes([_FREE]) * count)
        if start >= 0:
            return list(range(start, start + count))
        pages: list[int] = []
        page = -1
        while len(pages) < count:
            page = self._states.index(_FREE, page + 1)
            pages.append(page)
        return pages

    def _require_held(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages or not self._references[page]:
                raise IntegrityError(f"page {page} is held by nobody")
        if len(set(pages)) != len(pages):
            raise IntegrityError(f"a page is named twice: {list(pages)}")

    def _drop_holder(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page]:
            self._num_kept_back -= 1
        else:
            self._states[page] = _FREE
            self._num_unheld += 1

    def _check_holders(self, holders: Counter[int]) -> None:
        for page in holders:
            if not 0 <= page < self.num_pages:
                raise IntegrityError(f"a page table names page {page}, and there are {self.num_pages}")
        for page, references in enumerate(self._references):
            if references != holders[page]:
                raise IntegrityError(
                    f"page {page} counts {references} holders and stands in {holders[page]} page tables"
                )
            if (self._states[page] == _FREE) != (references == 0):
                raise IntegrityError(f"page {page} has {references} holders and is marked as the contrary")

    def _check_counts(self) -> None:
        unheld = self._references.count(0)
        kept_back = sum(references - 1 for references in self._references if references)
        if (unheld, kept_back) != (self._num_unheld, self._num_kept_back):
            raise IntegrityError(
                f"{unheld} pages are without holders and {kept_back} kept back, "
                f"not {self._num_unheld} and {self._num_kept_back}"
            )
        if kept_back > unheld:
            raise IntegrityError(f"{kept_back} pages are kept back for copies and only {unheld} are left")
