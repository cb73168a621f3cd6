"""KV cache manager: the sequences of one model over one pool of pages.

A sequence takes pages as it grows and gives them back as it is cut. A full page may be shared by any number of
sequences and is never written again: a sequence that writes into a page that is shared, or can be found through the
prefix cache, gets a copy of its own first. A page can be found once all tokens in it are committed. Pages that no layer
attends to any more are given back: their places in the page table are holes. Where only some layers have a window,
their part of a page is a window page (``WindowPages``), which goes back alone.

Nothing here waits for a device. A page that was given back may still be written by a forward that was started before;
its next owner's forward runs after that one, and a page that can be found is written by neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from outrider.errors import IntegrityError, InvalidRequestError
from outrider.kv_cache.groups import AttentionReach
from outrider.kv_cache.page_pool import PagePool
from outrider.kv_cache.page_tables import Ints, JoinedPages, PageTables, slots_in
from outrider.kv_cache.prefix_cache import PrefixCache
from outrider.kv_cache.sequence import KVSequence, PageTable, check_sequence
from outrider.kv_cache.state_slots import SequenceState, StateRows, StateSlots
from outrider.kv_cache.window_pages import WindowPages
from outrider.prefix_hash import PrefixHash

PageCopy = tuple[int, int]
"""(source page, destination page)."""


class KVCacheManager:
    """Manager of all KV sequences of one model."""

    def __init__(
        self,
        pool: PagePool,
        *,
        prefix_caching: bool = True,
        reach: AttentionReach | None = None,
        states: StateSlots | None = None,
        window: WindowPages | None = None,
    ) -> None:
        """``reach``: tokens that the model's layers attend to; None: all. ``states``: slots of recurrent layers.
        ``window``: pages of the layers with a window, where others see everything.
        """
        self.pool, self.reach, self.states, self.window = pool, reach, states, window
        self.prefix_cache = PrefixCache(pool) if prefix_caching else None
        """None when prefix caching is off."""
        self._sequences: set[KVSequence] = set()
        self._tables = PageTables(pool, window)
        if window is not None:
            pool.on_evict = self._evict_page

    def __len__(self) -> int:
        return len(self._sequences)

    def open(
        self, max_length: int, cache_salt: str = "", prefix_hash_key: bytes = b"", prefix_chain: bytes = b""
    ) -> KVSequence:
        """Open an empty sequence of at most ``max_length`` tokens. It takes no pages yet, but a slot where there are
        recurrent layers; ``OutOfPagesError`` if none is free. ``prefix_chain`` is of the prefix hash of full blocks
        that come before it in a text.
        """
        if max_length < 1:
            raise InvalidRequestError("max_length", f"must be at least 1, not {max_length}")
        root_key = self.prefix_cache.root_key(cache_salt) if self.prefix_cache is not None else b""
        sequence = KVSequence(max_length, root_key, prefix_hash_key, prefix_chain)
        if self.states is not None:
            sequence.state = self.states.open()
        self._sequences.add(sequence)
        return sequence

    def adopt_prefix(self, sequence: KVSequence, token_ids: Sequence[int]) -> int:
        """Give an empty sequence the longest cached prefix of ``token_ids``, in full pages.

        The last token is never adopted, because its logits have to be computed. Returns the number of adopted tokens.
        """
        self._require_open(sequence)
        if sequence.token_ids:
            raise InvalidRequestError("sequence", f"holds {sequence.length} tokens, and only an empty one can adopt")
        cache, size = self.prefix_cache, self.pool.page_size
        if cache is None:
            return 0
        keys: list[bytes] = []
        wanted = cache.page_keys(sequence.root_key, token_ids, stop=len(token_ids) - 1)
        pages = cache.find(_noting(wanted, keys), num_tokens=len(token_ids))
        if self.states is not None and sequence.state is not None:
            num_found = len(pages)
            pages = pages[: self.states.adopt(sequence.state, keys[:num_found])]
            cache.num_hit_tokens -= (num_found - len(pages)) * size
        if self.window is not None:
            num_found = len(pages)
            count, sequence.window_start = self.window.adoptable(pages)
            pages = pages[:count]
            cache.num_hit_tokens -= (num_found - count) * size
            self.window.share(pages[sequence.window_start :])
        self.pool.share(pages)
        sequence.page_table.extend(pages)
        sequence.page_keys = keys[: len(pages)]
        sequence.token_ids = list(token_ids[: len(pages) * size])
        sequence.num_registered_pages, sequence.num_cached_tokens = len(pages), len(pages) * size
        return sequence.num_cached_tokens

    def commit(self, sequence: KVSequence, length: int) -> None:
        """Register the full pages of the first ``length`` tokens in the prefix cache: these tokens are computed and
        committed. Then give back the pages that no layer attends to any more.
        """
        size, length = self.pool.page_size, min(length, sequence.length)
        if self.prefix_cache is not None and length >= (sequence.num_registered_pages + 1) * size:  # seldom
            self._register(self.prefix_cache, sequence, length // size)
        if self.reach is not None:
            self._tables.give_back(sequence, *self.reach.unseen_pages(length, size))
        if self.window is not None:
            self._tables.leave_window(sequence, self.window.unseen_stop(length))
        if sequence.state is not None:
            sequence.state.num_committed = length

    def hash_ahead(self, sequence: KVSequence) -> None:
        """Hash what ``commit`` and ``prefix_hash`` of all tokens will need: best while a device computes them."""
        if self.prefix_cache is not None:
            self._hash_pages(self.prefix_cache, sequence, sequence.length // self.pool.page_size)
        sequence.prefix_hash(sequence.length)

    def pages_needed(self, sequence: KVSequence, count: int) -> int:
        """Pages out of ``num_free`` that extending by ``count`` tokens takes."""
        needed = self._tables.pages_needed(sequence, count)
        if self.window is None:
            return needed
        return self.window.num_needed(needed, len(sequence.page_table) - sequence.window_start)

    def fits_alone(self, sequence: KVSequence, count: int) -> bool:
        """True if there are free pages for a sequence to grow by ``count`` tokens in many forwards."""
        needed = self._tables.pages_needed(sequence, count)
        if self.window is None or needed > self.pool.num_free:
            return needed <= self.pool.num_free
        num_held = len(sequence.page_table) - sequence.window_start
        return self.window.num_needed_in_turn(needed, num_held) <= self.window.pool.num_free

    def fit(self, growths: Iterable[tuple[KVSequence, int]]) -> bool:
        """True if there are free pages for all of these sequences to grow by this many tokens each, counted exactly."""
        needed = num_freed = 0
        for sequence, count in growths:
            needed += self._tables.pages_needed(sequence, count)
            if self.window is not None:
                leaving = sequence.page_table[sequence.window_start : self.window.unseen_stop(sequence.length)]
                num_freed += self.window.num_freed(leaving)
        return needed <= self.pool.num_free and (self.window is None or needed <= self.window.pool.num_free + num_freed)

    @property
    def num_free(self) -> int:
        """Number of free pages; with window pages, of these."""
        return self.pool.num_free if self.window is None else self.window.num_free

    @property
    def num_pages_free(self) -> int:
        """``num_free`` as a number of ``pool``'s pages."""
        return self.pool.num_free if self.window is None else self.window.num_free_of_pages

    def surely_fit(self, num_sequences: int, count: int) -> bool:
        """True if there are free pages for this many sequences to grow by ``count`` tokens each, wherever they end."""
        most = -(-count // self.pool.page_size) + 1  # and a copy of a shared page
        has_capacity = num_sequences * most <= self.pool.num_free
        return has_capacity and (self.window is None or self.window.surely_fit(num_sequences, most))

    def extend(self, sequence: KVSequence, token_ids: Sequence[int]) -> Sequence[int]:
        """Append tokens and return the slot of each. ``OutOfPagesError``, without a change, if there are too
        few pages.
        """
        self.require_capacity(sequence, len(token_ids))
        if self.window is not None:
            return self._extend_in_parts(self.window, sequence, token_ids)
        slots = self.extend_checked(sequence, token_ids)
        if sequence.state is not None:
            sequence.state.length = sequence.length  # what no forward computes counts as computed
        return slots

    def extend_checked(self, sequence: KVSequence, token_ids: Sequence[int]) -> Sequence[int]:
        """``extend`` within the length that ``require_capacity`` has checked."""
        held, size = sequence.token_ids, self.pool.page_size
        start, count = len(held), len(token_ids)
        if not count:
            return []
        table, (index, offset) = sequence.page_table, divmod(start, size)
        if offset and not self.pool.is_writable(table[index]):
            self._own_last_page(sequence, count)
        if start + count > len(table) * size:
            self._tables.take(sequence, -(-(start + count) // size))
        held += token_ids
        if offset + count <= size:  # slots of one page are neighbours
            first = table[index] * size + offset
            return list(range(first, first + count))
        return slots_in(table[index:], offset, count, size)

    def append_checked(self, sequence: KVSequence, token_id: int) -> int:
        """``extend_checked`` by one token: its slot."""
        held, table, size = sequence.token_ids, sequence.page_table, self.pool.page_size
        index, offset = divmod(len(held), size)
        if offset and not self.pool.is_writable(table[index]):
            self._own_last_page(sequence, 1)
        if index >= len(table):
            self._tables.take(sequence, index + 1)
        held.append(token_id)
        return table[index] * size + offset

    def has_room_for_one(self, sequence: KVSequence) -> bool:
        """True if ``require_capacity`` lets one more token pass."""
        return sequence in self._sequences and len(sequence.token_ids) < sequence.max_length

    def require_capacity(self, sequence: KVSequence, count: int) -> None:
        """Raise unless the sequence is open and may grow by ``count`` tokens. Changes nothing."""
        self._require_open(sequence)
        length = len(sequence.token_ids)
        if length + count > sequence.max_length:
            raise InvalidRequestError(
                "token_ids", f"{count} more tokens after {length} pass the max_length of {sequence.max_length}"
            )

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Truncate to the first ``length`` tokens and their pages.

        ``InvalidRequestError``, without a change, if tokens that the next ones attend to were given back.
        """
        self._require_open(sequence)
        if not 0 <= length <= sequence.length:
            raise InvalidRequestError("length", f"cannot keep {length} tokens of {sequence.length}")
        if length:
            self._require_held(sequence, length)
        if self.states is not None and sequence.state is not None:
            self.states.truncate(sequence.state, length)
        sequence.truncate_tokens(length)
        self._cut(sequence, length)

    def amend(self, sequence: KVSequence, length: int, token_ids: Sequence[int]) -> None:
        """Set the token ids after ``length``, which were appended as placeholders: as many, or fewer.

        Their KV stays in place. Tokens appended after them are truncated.
        """
        self._require_open(sequence)
        if not 0 <= length <= length + len(token_ids) <= sequence.length:
            raise InvalidRequestError(
                "length", f"{len(token_ids)} tokens after {length} were not appended to a sequence of {sequence.length}"
            )
        sequence.truncate_tokens(length)
        sequence.token_ids += token_ids
        self._cut(sequence, sequence.length)
        self._drop_keys(sequence, length // self.pool.page_size)

    def amend_last(self, sequences: Sequence[KVSequence], token_ids: Sequence[int]) -> None:
        """``amend`` of the last token of each, which was appended as a placeholder."""
        size = self.pool.page_size
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.amend_last(token_id)
            if len(sequence.page_keys) * size >= sequence.length:
                self._drop_keys(sequence, (sequence.length - 1) // size)

    # Many sequences at once.

    def reserve(
        self, sequences: Sequence[KVSequence], lengths: Sequence[int] | Ints, counts: Sequence[int] | Ints
    ) -> JoinedPages:
        """Have pages in which ``counts`` [B] more tokens, at least one each, can be written after the first ``lengths``
        [B] that sequences hold. These differ, are open and have room; of their pages only those in which the lengths
        end may be shared or be found. ``OutOfPagesError``, without a change, if too few pages are free.

        The sequences hold their former tokens, and pages that do not fit these, until ``replace_tails`` has said what
        the tokens are: a forward may be started meanwhile.
        """
        if self.window is not None:
            for sequence, length in zip(sequences, map(int, lengths), strict=True):
                self._require_held(sequence, length)
                self._leave_window(sequence, self.window.unseen_stop(length))
        return self._tables.reserve(sequences, lengths, counts)

    def release_reserved(self, sequences: Iterable[KVSequence]) -> None:
        """Release the pages that ``reserve`` has taken, where nothing is written. A page that is no more shared
        since then stays the sequence's own.
        """
        for sequence in sequences:
            self._tables.drop(sequence, self.pool.pages_for(sequence.length))

    def replace_tails(
        self, sequences: Sequence[KVSequence], lengths: Sequence[int], tails: Iterable[Sequence[int]]
    ) -> None:
        """Truncate each to its first ``lengths`` [B] tokens, and append others for which ``reserve`` has taken pages;
        those that are not needed are given back.
        """
        for sequence, length, tail in zip(sequences, lengths, tails, strict=True):
            if sequence.state is not None:
                sequence.state.num_committed = min(sequence.state.num_committed, length)
            sequence.replace_tail(length, tail)
            if len(sequence.page_keys) * self.pool.page_size > length:
                self._drop_keys(sequence, length // self.pool.page_size)
            self._tables.drop(sequence, -(-sequence.length // self.pool.page_size))

    def require_states(self, sequences: Sequence[KVSequence], lengths: Iterable[int]) -> None:
        """Raise ``InvalidRequestError`` if a sequence cannot go on after its first ``lengths`` [B] tokens."""
        if self.states is not None:
            for state, length in zip(_states_of(sequences), lengths, strict=True):
                self.states.require(state, length)

    def have_states(self, sequences: Sequence[KVSequence], lengths: Ints) -> bool:
        """True if ``require_states`` lets all pass."""
        if self.states is None:
            return True
        pairs = zip(_states_of(sequences), lengths.tolist(), strict=True)
        return all(state.reaches(length) for state, length in pairs)

    def plan_states(
        self,
        sequences: Sequence[KVSequence],
        lengths: Sequence[int],
        counts: Sequence[int],
        num_drafts: Sequence[int],
    ) -> StateRows | None:
        """States of the rows of a forward, as ``StateSlots.plan`` has them; None of models without recurrent layers.
        ``require_states`` has let the lengths pass.
        """
        slots = self.states
        if slots is None:
            return None
        states = _states_of(sequences)
        for sequence, state, length, count in zip(sequences, states, lengths, counts, strict=True):
            if self.prefix_cache is not None and length >= state.length and slots.is_due(state, count):
                num_pages = state.length // self.pool.page_size
                self._hash_pages(self.prefix_cache, sequence, num_pages)
                slots.snapshot(state, sequence.page_keys[num_pages - 1])
        return slots.plan(states, lengths, counts, num_drafts)

    def set_states_back(self, sequences: Sequence[KVSequence]) -> None:
        """Have states where a decode step finds them, for measurements; see ``StateSlots.set_back``."""
        if self.states is not None:
            for sequence, state in zip(sequences, _states_of(sequences), strict=True):
                self.states.set_back(state, sequence.length)

    def undo_states(self, sequences: Sequence[KVSequence], rows: StateRows | None) -> None:
        """A forward that was planned is not run."""
        if self.states is not None and rows is not None:
            self.states.undo(_states_of(sequences), rows)

    def lose_states(self, sequences: Iterable[KVSequence]) -> None:
        """A forward failed on the way: these sequences can only be truncated to nothing."""
        for sequence in sequences:
            if sequence.state is not None:
                sequence.state.length = sequence.max_length + 1

    # Further uses of what a sequence holds.

    def fork(self, sequence: KVSequence, max_length: int) -> KVSequence:
        """Return a second sequence with the same tokens. It takes no pages: all are shared until one of both writes."""
        self._require_open(sequence)
        if max_length < sequence.length:
            raise InvalidRequestError(
                "max_length", f"{max_length} is less than the {sequence.length} tokens to be forked"
            )
        fork = self.open(max_length)
        if self.states is not None and sequence.state is not None and fork.state is not None:
            self.states.fork(sequence.state, fork.state)
        self.pool.share(sequence.held_pages())
        if self.window is not None:
            self.window.share(sequence.page_table[sequence.window_start :])
        fork.window_start = sequence.window_start
        fork.page_table, fork.token_ids = sequence.page_table[:], list(sequence.token_ids)
        fork.holes = sequence.holes
        fork.root_key, fork.page_keys = sequence.root_key, list(sequence.page_keys)
        fork.num_registered_pages = sequence.num_registered_pages
        return fork

    def release(self, sequence: KVSequence) -> None:
        """Return the sequence's pages to the pool. It must not be used again."""
        self._require_open(sequence)
        sequence.is_open = False
        self._sequences.remove(sequence)
        self._tables.drop(sequence, 0)
        if self.states is not None and sequence.state is not None:
            self.states.release(sequence.state)

    def prefix_hash(self, sequence: KVSequence, length: int) -> PrefixHash:
        """Prefix hash of the first ``length`` tokens, with the key of the sequence."""
        self._require_open(sequence)
        return sequence.prefix_hash(length)

    def hash_tails(self, sequence: KVSequence, start: int) -> tuple[bytes, list[int]]:
        """The chain of the first ``start`` tokens, and the running hashes of these, of one more and so on, within
        their block.
        """
        self._require_open(sequence)
        return sequence.hash_tails(start)

    def num_pages(self, sequence: KVSequence) -> int:
        """Number of pages that the sequence holds, shared ones included; what of ``num_free`` they are, at most."""
        num_held = len(sequence.page_table) - len(sequence.holes)
        if self.window is None:
            return num_held
        return max(len(sequence.page_table) - sequence.window_start, self.window.share_of(num_held))

    def pages_of(self, sequence: KVSequence) -> PageTable:
        """A copy of the sequence's page table."""
        return sequence.page_table[:]

    def pending_copies(self) -> list[PageCopy]:
        """Page copies that the next forward makes first: all sources are read before any destination is written."""
        return [(source, destination) for destination, source in self._tables.pending_copies.items()]

    def confirm_copies(self) -> None:
        """Record that the pending copies were made, those of window pages and their places among them."""
        self._tables.pending_copies.clear()
        if self.window is not None:
            self.window.pending_copies.clear()
            self.window.pending_maps.clear()

    def check_integrity(self) -> None:
        """Raise ``IntegrityError``, naming the violation, unless pages, keys and lengths are consistent."""
        self.pool.check_integrity(sequence.held_pages() for sequence in self._sequences)
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        if self.states is not None:
            self.states.check_integrity(_states_of(self._sequences))
        if self.window is not None:
            self.window.check_integrity([one.page_table[one.window_start :] for one in self._sequences])
        for sequence in self._sequences:
            check_sequence(sequence, self.pool, self.prefix_cache)
        for destination in self._tables.pending_copies:
            if not self.pool.references(destination):
                raise IntegrityError(f"a copy is due to page {destination}, which is free")

    def _register(self, cache: PrefixCache, sequence: KVSequence, full: int) -> None:
        self._hash_pages(cache, sequence, full)
        for index in range(sequence.num_registered_pages, full):
            page, key = sequence.page_table[index], sequence.page_keys[index]
            if self.window is not None and cache.holds(key) and self.window.of(cache.page_of(key)) < 0:
                cache.evict(key)  # a page with its window page is of more use
            if cache.register(page, key) and self.window is not None:
                self.window.make_findable(page)
        sequence.num_registered_pages = full

    def _extend_in_parts(self, window: WindowPages, sequence: KVSequence, token_ids: Sequence[int]) -> Sequence[int]:
        """``extend`` by as many tokens at a time as a forward has; what was appended stays where pages run out."""
        slots: list[int] = []
        for start in range(0, len(token_ids), window.forward_tokens):
            self._tables.leave_window(sequence, window.unseen_stop(sequence.length))
            slots += self.extend_checked(sequence, token_ids[start : start + window.forward_tokens])
        return slots

    def _leave_window(self, sequence: KVSequence, stop: int) -> None:
        """Give back window pages while a long prompt is computed; what is computed can be found before it is committed:
        the tokens of these pages are too far from the last to be replaced.
        """
        if sequence.window_start < stop:
            if self.prefix_cache is not None and sequence.num_registered_pages < stop:
                self._register(self.prefix_cache, sequence, stop)
            self._tables.leave_window(sequence, stop)

    def _evict_page(self, page: int) -> None:
        """A page that can be found is taken for other content."""
        if self.prefix_cache is not None:
            self.prefix_cache.note_evicted(page)
        if self.window is not None:
            self.window.evict(page)

    def _hash_pages(self, cache: PrefixCache, sequence: KVSequence, full: int) -> None:
        """Have the keys of the first ``full`` pages, all of them full."""
        keys, size = sequence.page_keys, self.pool.page_size
        if len(keys) < full:
            parent = keys[-1] if keys else sequence.root_key
            keys += cache.page_keys(parent, sequence.token_ids, start=len(keys) * size, stop=full * size)

    def _cut(self, sequence: KVSequence, length: int) -> None:
        """Pages and keys past ``length`` tokens go; mostly there are none."""
        size, num_pages = self.pool.page_size, len(sequence.page_table)
        if (num_pages - 1) * size >= length:
            self._tables.drop(sequence, -(-length // size))
        if sequence.num_registered_pages * size > length or len(sequence.page_keys) * size > length:
            self._drop_keys(sequence, length // size)

    @staticmethod
    def _drop_keys(sequence: KVSequence, num_full_pages: int) -> None:
        del sequence.page_keys[num_full_pages:]
        sequence.num_registered_pages = min(sequence.num_registered_pages, num_full_pages)

    def _own_last_page(self, sequence: KVSequence, count: int) -> None:
        """Copy a partial page that is shared or can be found, before a write into it."""
        needed = self._tables.pages_needed(sequence, count)
        self.pool.require(needed)
        if self.window is not None:
            self.window.pool.require(needed)
        self._tables.own(sequence, len(sequence.page_table) - 1)

    def _require_held(self, sequence: KVSequence, length: int) -> None:
        """Raise if the last of ``length`` tokens, or a token after them, attends to a page that was given back."""
        if (sequence.holes or sequence.window_start) and self._attends_to_holes(sequence, length):
            raise InvalidRequestError("length", f"pages of the last tokens before {length} were given back")

    def _attends_to_holes(self, sequence: KVSequence, length: int) -> bool:
        size = self.pool.page_size
        if self.window is not None:
            return sequence.window_start * size > max(0, length - self.window.reach.window)
        if self.reach is None or length <= sequence.holes.start * size:
            return False
        return sequence.holes.stop * size > length - self.reach.window

    def _require_open(self, sequence: KVSequence) -> None:
        if sequence not in self._sequences:
            raise InvalidRequestError("sequence", "was released, or belongs to another cache")


def _states_of(sequences: Iterable[KVSequence]) -> list[SequenceState]:
    return [sequence.state for sequence in sequences if sequence.state is not None]


def _noting(keys: Iterator[bytes], noted: list[bytes]) -> Iterator[bytes]:
    """The keys as they are drawn, each noted."""
    for key in keys:
        noted.append(key)
        yield key
