"""The KV cache and a naive model do the same under random operations."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.errors import InvalidRequestError, OutOfPagesError
from outrider.kv_cache import AttentionReach, KVCacheManager, PagePool, WindowPages
from outrider.kv_cache.page_tables import PageTables
from tests.kv_cache.naive import NaiveCache, NaiveSequence

PAGE_SIZE = 4
NUM_PAGES = 48
MOST_SEQUENCES = 10
LONGEST = 64
REACH = AttentionReach(window=9, num_sinks=3, num_rewind_tokens=5)
WINDOW = AttentionReach(window=9, num_rewind_tokens=5)
NUM_WINDOW_PAGES = 30


class RandomOperations:
    """Operations of one seed; ``AssertionError`` or ``IntegrityError`` where cache and model part."""

    def __init__(
        self,
        seed: int,
        *,
        checks_every: int = 40,
        reach: AttentionReach | None = None,
        window: AttentionReach | None = None,
    ) -> None:
        self.random = random.Random(seed)
        pool = PagePool(NUM_PAGES, PAGE_SIZE)
        own = None if window is None else WindowPages(NUM_WINDOW_PAGES, pool, window, forward_tokens=LONGEST)
        self.manager = KVCacheManager(pool, reach=reach, window=own)
        self.model = NaiveCache(self.manager)
        self.counts: dict[str, int] = {}
        """Number of operations, by kind."""
        self._checks_every = checks_every
        self._num_texts = 0

    def run(self, num_operations: int) -> None:
        """Random operations; in the end all sequences are released and all pages free."""
        operations = (self._open, self._open, self._grow, self._grow, self._grow, self._commit, self._cut, self._amend)
        for number in range(num_operations):
            self.random.choice((*operations, self._go_on_together, self._fork, self._release))()
            if number % self._checks_every == 0:
                self.model.check()
        while self.model.sequences:
            self._release()
        self.model.check()
        assert self.manager.pool.num_used == 0
        assert self.manager.window is None or self.manager.window.pool.num_used == 0

    def _open(self) -> None:
        if len(self.model.sequences) == MOST_SEQUENCES:
            self._release()
        salt = self.random.choice(("", "", "tenant"))
        text = self._prompt()
        real = self.manager.open(LONGEST, salt)
        sequence = NaiveSequence(real, salt)
        expected = self.model.longest_cached(salt, text)
        assert self.manager.adopt_prefix(real, text) == expected == real.num_cached_tokens
        sequence.tokens = text[:expected]
        sequence.num_registered = expected // PAGE_SIZE
        self.model.sequences.append(sequence)
        self._count("hits" if expected else "misses")
        self._extend(sequence, text[expected:])

    def _prompt(self) -> list[int]:
        """Texts of few beginnings, so that many are met again; now and then one that was never there."""
        if self.random.random() < 0.1:
            self._num_texts += 1
        beginning = self.random.randrange(3) if self.random.random() < 0.8 else 100 + self._num_texts
        shared = [beginning * 1000 + position for position in range(self.random.randint(1, 28))]
        return shared + [self.random.randrange(2) for _ in range(self.random.randint(0, 9))]

    def _grow(self) -> None:
        """One forward of some sequences."""
        chosen = self.random.sample(self.model.sequences, min(self.random.randint(1, 3), len(self.model.sequences)))
        grown = []
        for sequence in chosen:
            count = min(self.random.choice((1, 1, 1, 2, 5, 9)), LONGEST - len(sequence.tokens))
            grown.append((sequence, [self.random.randrange(2) for _ in range(count)]))
        self._forward(grown)

    def _extend(self, sequence: NaiveSequence, tokens: list[int]) -> None:
        self._forward([(sequence, tokens)])

    def _forward(self, grown: list[tuple[NaiveSequence, list[int]]]) -> None:
        """Pages for all, then the copies, then the new tokens' KV."""
        writes: list[tuple[NaiveSequence, int, int]] = []
        for sequence, tokens in grown:
            writes += [(sequence, *write) for write in zip(self._take_slots(sequence, tokens), tokens, strict=False)]
        self._copy_pages()
        assert len({slot for _, slot, _ in writes}) == len(writes)
        for sequence, slot, token in writes:
            sequence.tokens.append(token)
            self.model.write(slot, sequence.text(len(sequence.tokens)))

    def _go_on_together(self) -> None:
        """One forward of several sequences, each after fewer tokens than it holds, whose ids are told afterwards."""
        most = min(self.random.randint(1, 6), len(self.model.sequences))
        own: list[tuple[NaiveSequence, int, list[int]]] = []
        for sequence in self.random.sample(self.model.sequences, most):
            length = max(0, len(sequence.tokens) - self.random.choice((0, 0, 1, 2, 5, 20)))
            count = min(self.random.choice((1, 2, 5, 9)), LONGEST - length)
            pages = sequence.real.page_table[length // PAGE_SIZE + 1 :]  # only the one before them may be shared
            if count and self.model.can_cut(sequence, length) and all(map(self.manager.pool.is_writable, pages)):
                own.append((sequence, length, [self.random.randrange(2) for _ in range(count)]))
        if not own or (slots := self._take_slots_together(own)) is None:
            return
        self._copy_pages()
        self.manager.replace_tails(
            [one.real for one, *_ in own], [length for _, length, _ in own], [t for *_, t in own]
        )
        assert len({slot for row in slots for slot in row}) == sum(map(len, slots))
        for (sequence, length, tokens), row in zip(own, slots, strict=True):
            self.model.cut(sequence, length)
            for slot, token in zip(row, tokens, strict=True):
                sequence.tokens.append(token)
                self.model.write(slot, sequence.text(len(sequence.tokens)))

    def _take_slots_together(self, own: list[tuple[NaiveSequence, int, list[int]]]) -> list[list[int]] | None:
        """The slots of each; None if there are too few pages."""
        pool, reals = self.manager.pool, [sequence.real for sequence, *_ in own]
        lengths = np.array([length for _, length, _ in own])
        counts = np.array([len(tokens) for *_, tokens in own])
        held, before = set(self.model.references()), [list(real.page_table) for real in reals]
        self._register_early(own)
        places = [(table, length // PAGE_SIZE) for table, (_, length, _) in zip(before, own, strict=True)]
        firsts = [table[place] for table, place in places if place < len(table)]
        num_shared, num_free = sum(not pool.is_writable(page) for page in firsts), pool.num_free
        ends = zip(before, lengths + counts, strict=True)
        needed = sum(max(0, pool.pages_for(int(end)) - len(table)) for table, end in ends) + num_shared
        try:
            joined = self.manager.reserve(reals, lengths, counts)
        except OutOfPagesError:
            assert needed > num_free or self._lacks_window_pages(needed)
            assert [list(real.page_table) for real in reals] == before
            assert pool.num_free == num_free
            self._count("out of pages together")
            return None
        self._count("shared together", num_shared)
        rows = np.repeat(np.arange(len(own)), counts)
        positions = np.concatenate(
            [np.arange(length, length + count) for length, count in zip(lengths, counts, strict=True)]
        )
        flat = joined.slots(positions, rows)
        np.testing.assert_array_equal(joined.slots(lengths), flat[np.cumsum(counts) - counts])
        taken = {page for real in reals for page in real.held_pages()} - held
        if not pool.num_free:
            taken |= set(firsts)  # a page that was given up may come back when there is no other
        self.model.note_taken(taken & set((flat // PAGE_SIZE).tolist()))
        return [part.tolist() for part in np.split(flat, np.cumsum(counts)[:-1])]

    def _register_early(self, own: list[tuple[NaiveSequence, int, list[int]]]) -> None:
        """Registration of pages that leave the window before a forward, which can be found from then on."""
        if (window := self.manager.window) is None:
            return
        for sequence, length, _ in own:
            if sequence.real.window_start < (stop := window.unseen_stop(length)):
                self._count("left window")
                self.model.register(sequence, stop * PAGE_SIZE, list(sequence.real.page_table))

    def _lacks_window_pages(self, needed: int) -> bool:
        self._count("out of window pages")
        return self.manager.window is not None and needed > self.manager.window.pool.num_free

    def _take_slots(self, sequence: NaiveSequence, tokens: list[int]) -> Sequence[int]:
        manager, model = self.manager, self.model
        needed, num_free = PageTables(manager.pool).pages_needed(sequence.real, len(tokens)), manager.pool.num_free
        held, before = set(model.references()), list(sequence.real.held_pages())
        try:
            slots = manager.extend(sequence.real, tokens)
        except OutOfPagesError:
            assert needed > num_free or self._lacks_window_pages(needed)
            assert list(sequence.real.held_pages()) == before
            self._count("out of pages")
            return []
        assert num_free - manager.pool.num_free == needed
        taken = set(sequence.real.held_pages()) - held
        if not manager.pool.num_free and before:
            taken.add(before[-1])  # a page that was given up may come back when there is no other
        model.note_taken(taken & {slot // PAGE_SIZE for slot in slots})
        return slots

    def _copy_pages(self) -> None:
        copies = self.manager.pending_copies()
        self._count("copies", len(copies))
        read = {
            (destination, offset): self.model.slots[source * PAGE_SIZE + offset]
            for source, destination in copies
            for offset in range(PAGE_SIZE)
            if source * PAGE_SIZE + offset in self.model.slots
        }
        for (destination, offset), content in read.items():
            self.model.slots[destination * PAGE_SIZE + offset] = content
        if (window := self.manager.window) is not None:
            self.model.window_slots |= {
                destination * PAGE_SIZE + offset: content
                for (destination, offset), content in {
                    (destination, offset): self.model.window_slots[source * PAGE_SIZE + offset]
                    for destination, source in window.pending_copies.items()
                    for offset in range(PAGE_SIZE)
                    if source * PAGE_SIZE + offset in self.model.window_slots
                }.items()
            }
        self.manager.confirm_copies()

    def _commit(self) -> None:
        if self.model.sequences:
            sequence = self.random.choice(self.model.sequences)
            length = self.random.randint(0, len(sequence.tokens))
            pages = list(sequence.real.page_table)
            if self.random.random() < 0.5:
                self.manager.hash_ahead(sequence.real)
            self.manager.commit(sequence.real, length)
            self.model.commit(sequence, length, pages)
            self._count("given back", len(sequence.real.holes) > 0 or sequence.real.window_start > 0)

    def _cut(self) -> None:
        if self.model.sequences:
            sequence = self.random.choice(self.model.sequences)
            length = max(0, len(sequence.tokens) - self.random.choice((0, 1, 2, 3, 7, 30)))
            if length and not self.model.can_cut(sequence, length):
                with pytest.raises(InvalidRequestError, match="were given back"):
                    self.manager.truncate(sequence.real, length)
                self._count("kept")
                return
            self.manager.truncate(sequence.real, length)
            self.model.cut(sequence, length)

    def _amend(self) -> None:
        """Tokens that only the device knew are told afterwards: never any that were committed."""
        if not self.model.sequences:
            return
        sequence = self.random.choice(self.model.sequences)
        count = min(self.random.randint(1, 6), LONGEST - len(sequence.tokens))
        start = len(sequence.tokens)
        self._extend(sequence, [7] * count)
        if len(sequence.tokens) == start:
            return
        told = [self.random.randrange(2) for _ in range(self.random.randint(0, count))]
        self.manager.amend(sequence.real, start, told)
        self.model.cut(sequence, start)
        sequence.tokens += told
        for position in range(start, len(sequence.tokens)):
            slot = sequence.real.page_table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            self.model.write(slot, sequence.text(position + 1))

    def _fork(self) -> None:
        if self.model.sequences and len(self.model.sequences) < MOST_SEQUENCES:
            parent = self.random.choice(self.model.sequences)
            num_free = self.manager.pool.num_free
            real = self.manager.fork(parent.real, LONGEST)
            assert self.manager.pool.num_free == num_free
            fork = NaiveSequence(real, parent.salt, list(parent.tokens), parent.num_registered, parent.committed)
            self.model.sequences.append(fork)

    def _release(self) -> None:
        if self.model.sequences:
            sequence = self.model.sequences.pop(self.random.randrange(len(self.model.sequences)))
            self.manager.release(sequence.real)

    def _count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number


@pytest.mark.parametrize(("seed", "num_operations"), [(1, 10_000), pytest.param(2, 100_000, marks=pytest.mark.slow)])
def test_cache_and_naive_model_agree(seed: int, num_operations: int) -> None:
    operations = RandomOperations(seed)
    operations.run(num_operations)
    counts = operations.counts
    assert min(counts["hits"], counts["misses"], counts["copies"], counts["out of pages"]) > num_operations / 200
    assert operations.model.num_evicted > num_operations / 200
    assert min(counts["shared together"], counts["out of pages together"]) > num_operations / 1000


@pytest.mark.parametrize(("seed", "num_operations"), [(3, 10_000), pytest.param(4, 100_000, marks=pytest.mark.slow)])
def test_they_agree_where_pages_that_leave_a_window_are_given_back(seed: int, num_operations: int) -> None:
    operations = RandomOperations(seed, reach=REACH)
    operations.run(num_operations)
    counts = operations.counts
    assert min(counts["hits"], counts["copies"], counts["given back"]) > num_operations / 200
    assert counts["kept"], "no truncation met pages that were given back"


@pytest.mark.parametrize(("seed", "num_operations"), [(5, 10_000), pytest.param(6, 100_000, marks=pytest.mark.slow)])
def test_they_agree_where_some_layers_have_window_pages(seed: int, num_operations: int) -> None:
    operations = RandomOperations(seed, window=WINDOW)
    operations.run(num_operations)
    counts = operations.counts
    assert min(counts["hits"], counts["copies"], counts["given back"], counts["left window"]) > num_operations / 400
    assert min(counts["kept"], counts["out of window pages"]) > num_operations / 1000
