"""Window pages: pages of the layers with a sliding window, in models whose other layers see everything.

A page of the ``PagePool`` of all sequences holds tokens of the layers that see everything. Those of the layers with a
window lie in its window page, which comes from a second, smaller pool and goes back when no sequence attends to it any
more. Sequences have one page table: ``WindowPages`` maps pages to window pages, and each device has a copy of the map.

A sequence holds the window pages of its page table from ``window_start`` on. A window page whose page can be found
stays until its memory is needed; a prefix can be adopted up to a place before which all that a window sees is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.errors import IntegrityError
from outrider.kv_cache.groups import AttentionReach
from outrider.kv_cache.page_pool import PagePool

_NONE = -1
_PARTIAL_PAGES = 2
"""Pages of a sequence of which its window, or a forward, sees only a part."""


class WindowPages:
    """The window pages of one pool of pages."""

    def __init__(self, num_pages: int, pages: PagePool, reach: AttentionReach, *, forward_tokens: int) -> None:
        """``num_pages``: of windows, no more than there are ``pages``. ``reach``: tokens that any layer with a window
        attends to. ``forward_tokens``: of the longest forward.
        """
        self.pool, self.reach = PagePool(num_pages, pages.page_size), reach
        self.forward_tokens = forward_tokens
        self.pending_maps: dict[int, int] = {}
        """Page -> window page, not yet on the devices."""
        self.pending_copies: dict[int, int] = {}
        """Destination -> source, as those of ``PageTables``."""
        self._pages = pages
        self._of = [_NONE] * pages.num_pages
        self._page_of = [_NONE] * num_pages
        self._most_held = num_window_pages(reach, forward_tokens, pages.page_size)
        self.pool.on_evict = self._unmap

    def unseen_stop(self, length: int) -> int:
        """Index of the first page that a token attends to after the first ``length``, or fewer by the rewind."""
        return self.reach.unseen_pages(length, self.pool.page_size)[1]

    # Admission counts window pages: pages are converted to their share of the pool, rounded up.

    @property
    def num_free(self) -> int:
        """Free window pages, or as large a share of the pages that are free, where that is less."""
        return min(self.pool.num_free, self.share_of(self._pages.num_free))

    @property
    def num_free_of_pages(self) -> int:
        """Pages that are free, or as large a share of them as window pages are free, where that is less."""
        return min(self._pages.num_free, self.pool.num_free * self._pages.num_pages // self.pool.num_pages)

    def share_of(self, num_pages: int) -> int:
        """Share of the window pages, as large as that of ``num_pages`` of all pages."""
        return -(-num_pages * self.pool.num_pages // self._pages.num_pages)

    def num_needed(self, num_pages: int, num_held: int) -> int:
        """Window pages out of ``num_free`` that a sequence takes for ``num_pages`` more pages, which it holds in turn.
        ``num_held``: window pages that it holds already.
        """
        return max(self.num_needed_in_turn(num_pages, num_held), self.share_of(num_pages))

    def num_needed_in_turn(self, num_pages: int, num_held: int) -> int:
        """Window pages that a sequence takes beside those it holds, which it gives back as it grows."""
        return min(num_pages, self._most_held - num_held)

    def num_freed(self, pages: Iterable[int]) -> int:
        """Number of window pages that are free once one sequence holds those of ``pages`` no more."""
        return sum(self.pool.references(self._of[page]) == 1 for page in pages)

    def surely_fit(self, num_sequences: int, num_pages: int) -> bool:
        """True if there are window pages for this many sequences to take ``num_pages`` each."""
        return num_sequences * min(num_pages, self._most_held) <= self.pool.num_free

    def of(self, page: int) -> int:
        """Window page of a page; -1: it has none."""
        return self._of[page]

    def give(self, pages: Sequence[int], *, after: int | None = None) -> None:
        """Window pages for pages that were just taken, best those behind the window page of the page ``after``."""
        before = None if after is None or self._of[after] == _NONE else self._of[after]
        for page, own in zip(pages, self.pool.allocate(len(pages), after=before), strict=True):
            self._map(page, own)

    def share(self, pages: Iterable[int]) -> None:
        """One more sequence holds the window pages of ``pages``."""
        self.pool.share([self._of[page] for page in pages])

    def release(self, pages: Iterable[int]) -> None:
        """A sequence holds the window pages of ``pages`` no more."""
        for own in self.pool.release([self._of[page] for page in pages]):
            self.pending_copies.pop(own, None)
            if not self.pool.is_findable(own):
                self._unmap(own)

    def source_of(self, page: int) -> int:
        """Window page with the content of a page that is about to be copied: before the page is released."""
        own = self._of[page]
        return self.pending_copies.get(own, own)

    def give_copy(self, page: int, source: int) -> None:
        """A window page for a page that was taken for a copy."""
        self.give([page])
        if self._of[page] != source:
            self.pending_copies[self._of[page]] = source

    def make_findable(self, page: int) -> None:
        """The page can be found: its window page, if it has one, is kept for the prefix cache."""
        if self._of[page] != _NONE:
            self.pool.make_findable(self._of[page])

    def evict(self, page: int) -> None:
        """The page cannot be found any more."""
        if (own := self._of[page]) != _NONE:
            self.pool.make_unfindable(own)
            if not self.pool.references(own):
                self._unmap(own)

    def adoptable(self, pages: Sequence[int]) -> tuple[int, int]:
        """Number of the first ``pages`` of a text that can be adopted, and the index of the first such window page."""
        size, count = self.pool.page_size, len(pages)
        while count:
            first = max(0, (count * size - self.reach.window) // size)  # as far as ``truncate`` asks for
            missing = next(
                (index for index in range(count - 1, first - 1, -1) if self._of[pages[index]] == _NONE), None
            )
            if missing is None:
                break
            count = missing
        if not count:
            return 0, 0
        least = self.unseen_stop(count * size)
        while first > least and self._of[pages[first - 1]] != _NONE:
            first -= 1
        return count, first

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise ``IntegrityError`` unless pools and maps agree; ``held``: the pages of which each sequence holds the
        window pages.
        """
        self.pool.check_integrity([self._of[page] for page in table] for table in held)
        for page, own in enumerate(self._of):
            if own != _NONE and self._page_of[own] != page:
                raise IntegrityError(f"page {page} has window page {own}, which is that of page {self._page_of[own]}")
        for own, page in enumerate(self._page_of):
            if page != _NONE and self._of[page] != own:
                raise IntegrityError(f"window page {own} is that of page {page}, which has {self._of[page]}")
            if (page == _NONE) != self.pool.is_blank(own):
                raise IntegrityError(f"window page {own} of page {page} is wrongly blank or taken")
            if page != _NONE and not self._pages.references(page) and self.pool.references(own):
                raise IntegrityError(f"window page {own} has holders, and its page {page} has none")

    def _map(self, page: int, own: int) -> None:
        self._of[page], self._page_of[own] = own, page
        self.pending_maps[page] = own

    def _unmap(self, own: int) -> None:
        page, self._page_of[own] = self._page_of[own], _NONE
        self._of[page] = _NONE


def num_window_pages(reach: AttentionReach, num_tokens: int, page_size: int) -> int:
    """Window pages that a sequence can hold before a forward of ``num_tokens`` of its tokens has ended."""
    return -(-(reach.window + reach.num_rewind_tokens + num_tokens) // page_size) + _PARTIAL_PAGES
