"""A naive model of the KV cache: what every slot holds, and which pages can be found, kept in the plainest way.

Owns the truth that ``KVCacheManager`` is compared with. A slot holds the whole text up to its token, salt included, as
KV depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.kv_cache import KVCacheManager, KVSequence

Text = tuple[object, ...]
"""A salt and the tokens after it."""


@dataclass
class NaiveSequence:
    """Expected content of one sequence."""

    real: KVSequence
    salt: str
    tokens: list[int] = field(default_factory=list)
    num_registered: int = 0
    """Leading pages that were committed: each is offered to the cache once."""
    committed: int = 0
    """The most tokens that were committed since the sequence last had all of its pages."""

    def text(self, length: int) -> Text:
        return (self.salt, *self.tokens[:length])


class NaiveCache:
    """Every slot's content, and the findable pages in the order in which they are to be evicted."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.size = manager.pool.page_size
        self.slots: dict[int, Text] = {}
        self.window_slots: dict[int, Text] = {}
        """Slots of window pages."""
        self.sequences: list[NaiveSequence] = []
        self.findable: dict[Text, int] = {}
        self.num_evicted = 0

    def references(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for sequence in self.sequences:
            for page in sequence.real.held_pages():
                counts[page] = counts.get(page, 0) + 1
        return counts

    def longest_cached(self, salt: str, tokens: list[int]) -> int:
        """Number of tokens that a new sequence may take over; at least one less than all."""
        length = 0
        while length + self.size < len(tokens) and (salt, *tokens[: length + self.size]) in self.findable:
            length += self.size
        while length and not self._has_window(salt, tokens, length):
            length -= self.size
        return length

    def _has_window(self, salt: str, tokens: list[int], length: int) -> bool:
        """True if the window pages are there of what the last of ``length`` tokens and later ones attend to."""
        window = self.manager.window
        if window is None:
            return True
        seen = range(max(0, length - window.reach.window), length)
        ends = {(position // self.size + 1) * self.size for position in seen}
        return all(window.of(self.findable[(salt, *tokens[:end])]) >= 0 for end in ends)

    def commit(self, sequence: NaiveSequence, length: int, pages: list[int]) -> None:
        """``pages`` are the sequence's page table before."""
        self.register(sequence, length, pages)
        sequence.committed = max(sequence.committed, length)
        self.check_holes(sequence)

    def register(self, sequence: NaiveSequence, length: int, pages: list[int]) -> None:
        """The full pages of the first ``length`` tokens can be found; of two pages one that has its window page."""
        window = self.manager.window
        for index in range(sequence.num_registered, length // self.size):
            text = sequence.text((index + 1) * self.size)
            if window is not None and text in self.findable and window.of(self.findable[text]) < 0:
                del self.findable[text]
            self.findable.setdefault(text, pages[index])
            sequence.num_registered = index + 1

    def check_holes(self, sequence: NaiveSequence) -> None:
        """Pages that no token may attend to any more were given back, and no others."""
        reach, expected = self.manager.reach, []
        if reach is not None:
            earliest = sequence.committed - reach.num_rewind_tokens  # query
            for index in range(len(sequence.tokens) // self.size):
                positions = range(index * self.size, (index + 1) * self.size)
                if all(reach.num_sinks <= position <= earliest - reach.window for position in positions):
                    expected.append(index)
        assert list(sequence.real.holes) == expected

    def can_cut(self, sequence: NaiveSequence, length: int) -> bool:
        """True if all that the last of ``length`` tokens and later ones attend to is held."""
        if (window := self.manager.window) is not None:
            return max(0, length - window.reach.window) >= sequence.real.window_start * self.size
        reach = self.manager.reach
        if reach is None:
            return True
        seen = {*range(min(length, reach.num_sinks)), *range(max(0, length - reach.window), length)}
        return not {position // self.size for position in seen} & set(sequence.real.holes)

    def cut(self, sequence: NaiveSequence, length: int) -> None:
        del sequence.tokens[length:]
        sequence.num_registered = min(sequence.num_registered, length // self.size)
        if not sequence.real.holes:
            sequence.committed = min(sequence.committed, length)

    def write(self, slot: int, text: Text) -> None:
        """A forward writes one token's KV: never into a page that can be found, or that another sequence holds."""
        page = slot // self.size
        assert page not in self.findable.values(), f"page {page} can be found and is written to"
        self.slots[slot] = text
        if (window := self.manager.window) is not None:
            own = window.of(page)
            assert own >= 0
            assert not window.pool.is_findable(own)
            assert window.pool.references(own) == 1
            self.window_slots[own * self.size + slot % self.size] = text

    def note_taken(self, before: set[int]) -> None:
        """Pages that were free before and have another owner now are found no more."""
        for text, page in list(self.findable.items()):
            if page in before:
                del self.findable[text]
                self.num_evicted += 1

    def check_window(self, sequence: NaiveSequence) -> None:
        """All that the next token's window sees, and every window page that is held, is the sequence's text."""
        if (window := self.manager.window) is None:
            return
        real, length = sequence.real, len(sequence.tokens)
        assert real.window_start * self.size <= max(0, length - window.reach.window + 1)
        for position in range(real.window_start * self.size, length):
            own = window.of(real.page_table[position // self.size])
            assert self.window_slots[own * self.size + position % self.size] == sequence.text(position + 1)

    def check(self) -> None:
        """All slots of all sequences hold their texts; free and findable pages are as many as there should be."""
        for sequence in self.sequences:
            real = sequence.real
            assert real.token_ids == sequence.tokens
            self.check_holes(sequence)
            for position in range(len(sequence.tokens)):
                if position // self.size in real.holes:
                    continue
                slot = real.page_table[position // self.size] * self.size + position % self.size
                assert self.slots[slot] == sequence.text(position + 1), f"slot {slot} at {position}"
            self.check_window(sequence)
        pool, cache = self.manager.pool, self.manager.prefix_cache
        assert pool.num_used == len(self.references())
        assert cache is not None
        assert len(cache) == len(self.findable)
        for text, page in self.findable.items():
            first = page * self.size
            for offset in range(self.size):
                end = len(text) - self.size + offset + 1
                assert self.slots[first + offset] == text[:end]
        self.manager.check_integrity()
