"""Page pool: free KV pages, and reference counts of the others.

A page with no references is free. A free page that is in the prefix cache is allocated last, the least recently used
first, and is evicted from the cache then. Handles page numbers only: no tokens, no tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from outrider.errors import IntegrityError, OutOfPagesError

_BLANK = 1
"""Free, and its content is of no use."""
_TAKEN = 0
"""Page that is held, or free with content that can be found."""


class PagePool:
    """Reference counts and free queue of ``num_pages`` pages of ``page_size`` tokens each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one token, not {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] = lambda page: None
        """Called with a findable page that is taken for other content."""
        # One byte a page, so that a run of blank pages is found by a substring search.
        self._states = bytearray([_BLANK]) * num_pages
        self._num_blank = num_pages
        self._references = [0] * num_pages
        self._is_findable = bytearray(num_pages)
        self._is_writable = bytearray(num_pages)
        """Flags of pages with one reference that cannot be found."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Free pages that can be found, least recently used first."""
        self._cursor = 0
        """Start of the search for a run of blank pages."""

    @property
    def num_free(self) -> int:
        """Number of pages without references."""
        return self._num_blank + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Number of pages with references."""
        return self.num_pages - self.num_free

    @property
    def num_evictable(self) -> int:
        """Number of free pages in the prefix cache."""
        return len(self._evictable)

    def pages_for(self, length: int) -> int:
        """Number of pages that hold ``length`` tokens."""
        return -(-length // self.page_size)

    def references(self, page: int) -> int:
        """Number of sequences that reference a page."""
        return self._references[page]

    def is_writable(self, page: int) -> bool:
        """True if a page has one reference and is not in the prefix cache."""
        return self._is_writable[page] > 0

    def is_findable(self, page: int) -> bool:
        """True if a page is in the prefix cache."""
        return bool(self._is_findable[page])

    def is_blank(self, page: int) -> bool:
        """True if a page is free and its content is of no use."""
        return self._states[page] == _BLANK

    def require(self, count: int) -> None:
        """Raise ``OutOfPagesError`` unless ``count`` pages are free. Changes nothing."""
        if count > self.num_free:
            raise OutOfPagesError(f"{count} KV pages are needed and {self.num_free} of {self.num_pages} are free")

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Allocate ``count`` free pages; ``OutOfPagesError``, without a change, if there are fewer.

        Pages that follow ``after`` are preferred, then a run with ``room`` for this many, because adjacent pages are
        read without gathering. Cached pages are evicted only if there are no others.
        """
        self.require(count)
        pages = self._take_blank(min(count, self._num_blank), after, room)
        while len(pages) < count:
            pages.append(self._evict())
        for page in pages:
            self._references[page] = self._is_writable[page] = 1
        return pages

    def allocate_next(self, after: int) -> int | None:
        """``allocate`` the page that follows ``after``, if its content is of no use to others."""
        page = after + 1
        if page >= self.num_pages or self._states[page] != _BLANK:
            return None
        self._states[page] = _TAKEN
        self._num_blank -= 1
        self._references[page] = self._is_writable[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, which may be in use or cached."""
        for page in pages:
            if not self._references[page]:
                if page not in self._evictable:
                    raise IntegrityError(f"page {page} is free and cannot be found")
                del self._evictable[page]
            self._references[page] += 1
            self._is_writable[page] = False

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drop one reference of each page; returns the pages that are free now.

        The last page of a run is evicted first, because it is useless without the pages before it.
        """
        freed: list[int] = []
        for page in reversed(pages):
            if not 0 <= page < self.num_pages or not self._references[page]:
                raise IntegrityError(f"page {page} has no holder")
            self._references[page] -= 1
            num_left = self._references[page]
            self._is_writable[page] = num_left == 1 and not self._is_findable[page]
            if not num_left:
                freed.append(page)
                self._free(page)
        return freed

    def make_findable(self, page: int) -> None:
        """Keep the content of a page for the prefix cache until it is evicted, also without references."""
        if not self._references[page]:
            raise IntegrityError(f"page {page} has no holder")
        self._is_findable[page] = True
        self._is_writable[page] = False

    def make_unfindable(self, page: int) -> None:
        """Undo ``make_findable``."""
        if not self._is_findable[page]:
            return
        self._is_findable[page] = False
        self._is_writable[page] = self._references[page] == 1
        if not self._references[page]:
            del self._evictable[page]
            self._free(page)

    def check_integrity(self, page_tables: Iterable[Sequence[int]]) -> None:
        """Raise ``IntegrityError`` unless reference counts and queues agree with these page tables, which must
        be all.
        """
        holders: Counter[int] = Counter()
        for table in page_tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a page table names a page twice: {list(table)}")
            holders.update(table)
        for page in holders:
            if not 0 <= page < self.num_pages:
                raise IntegrityError(f"a page table names page {page}, and there are {self.num_pages}")
        for page in range(self.num_pages):
            self._check_page(page, holders[page])
        if self._states.count(_BLANK) != self._num_blank:
            raise IntegrityError(f"{self._states.count(_BLANK)} pages are blank, not {self._num_blank}")

    def _take_blank(self, count: int, after: int | None, room: int) -> list[int]:
        if not count:
            return []
        start = -1
        if after is not None and self._states.startswith(bytes([_BLANK]) * count, after + 1):
            start = after + 1
        elif (start := self._find_run(max(count, room))) >= 0:
            self._cursor = start + max(count, room)
        elif room > count:
            start = self._find_run(count)
        pages = list(range(start, start + count)) if start >= 0 else self._scattered(count)
        for page in pages:
            self._states[page] = _TAKEN
        self._num_blank -= count
        return pages

    def _find_run(self, count: int) -> int:
        """The first of ``count`` blank neighbours, -1 if there is no such run."""
        run = bytes([_BLANK]) * count
        start = self._states.find(run, self._cursor)
        return start if start >= 0 else self._states.find(run)

    def _scattered(self, count: int) -> list[int]:
        pages: list[int] = []
        page = -1
        while len(pages) < count:
            page = self._states.index(_BLANK, page + 1)
            pages.append(page)
        return pages

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        self._is_findable[page] = False
        self.on_evict(page)
        return page

    def _free(self, page: int) -> None:
        if self._is_findable[page]:
            self._evictable[page] = None
        else:
            self._states[page] = _BLANK
            self._num_blank += 1

    def _check_page(self, page: int, num_holders: int) -> None:
        references, is_findable = self._references[page], bool(self._is_findable[page])
        if references != num_holders:
            raise IntegrityError(f"page {page} counts {references} holders and stands in {num_holders} page tables")
        if self.is_writable(page) != (references == 1 and not is_findable):
            raise IntegrityError(f"page {page} with {references} holders is wrongly marked as writable or not")
        if (page in self._evictable) != (not references and is_findable):
            raise IntegrityError(f"page {page} with {references} holders is wrongly queued for eviction")
        if (self._states[page] == _BLANK) != (not references and not is_findable):
            raise IntegrityError(f"page {page} with {references} holders is wrongly marked as blank or taken")
