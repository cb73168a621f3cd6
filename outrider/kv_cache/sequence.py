"""KV sequence: token ids, the pages with their KV, and the check that they agree."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeAlias

from outrider.errors import IntegrityError
from outrider.kv_cache.page_pool import PagePool
from outrider.kv_cache.prefix_cache import PrefixCache
from outrider.kv_cache.state_slots import SequenceState
from outrider.prefix_hash import PrefixHash, PrefixHasher

PageTable: TypeAlias = "array[int]"
"""Page numbers of 32 bits each, as a device reads them: position p lies in page ``table[p // page_size]``."""


def page_table_of(pages: Iterable[int]) -> PageTable:
    """A page table of these pages."""
    return array("i", pages)


class KVSequence:
    """One KV sequence. Only its ``KVCacheManager`` changes it."""

    __slots__ = (
        "_prefix_hasher",
        "holes",
        "is_open",
        "max_length",
        "num_cached_tokens",
        "num_registered_pages",
        "page_keys",
        "page_table",
        "root_key",
        "state",
        "token_ids",
        "window_start",
    )

    def __init__(
        self, max_length: int, root_key: bytes = b"", prefix_hash_key: bytes = b"", prefix_chain: bytes = b""
    ) -> None:
        """``prefix_chain``: of the prefix hash of a text that the sequence is only the end of."""
        self.max_length = max_length
        """Tokens that it can grow to."""
        self.page_table = page_table_of(())
        """The pages of ``token_ids``, and no others. Those at the indices ``holes`` were given back: their entries mean
        nothing, and no kernel reads them.
        """
        self.holes = range(0)
        self.window_start = 0
        """Index of the first page whose window page is held; those of all later ones are. Of ``WindowPages``."""
        self.token_ids: list[int] = []
        """The tokens whose KV is held, or is computed by a forward that has been started."""
        self.is_open = True
        self.num_cached_tokens = 0
        """Tokens whose KV came from the prefix cache and was not computed for this sequence."""
        self.num_registered_pages = 0
        """Leading full pages whose content the prefix cache knows, in these pages or in others."""
        self.root_key = root_key
        self.page_keys: list[bytes] = []
        """Keys of leading full pages, as far as they are known."""
        self.state: SequenceState | None = None
        """State of models with recurrent layers."""
        self._prefix_hasher = PrefixHasher(prefix_hash_key, prefix_chain)

    @property
    def length(self) -> int:
        """``num_computed_tokens``, under the name that all sequence types share."""
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is computed, or is being computed by a forward that has started."""
        return len(self.token_ids)

    def held_pages(self, start: int = 0, stop: int | None = None) -> PageTable:
        """Pages from index ``start`` to ``stop`` that the sequence holds, in order."""
        table, holes = self.page_table, self.holes
        if not holes:
            return table[start:stop]
        end = len(table) if stop is None else stop
        return table[start : min(end, max(start, holes.start))] + table[max(start, holes.stop) : end]

    def prefix_hash(self, length: int) -> PrefixHash:
        """Prefix hash of the first ``length`` tokens. Each token is hashed once in its life."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a prefix of {length} tokens of a sequence of {self.length}")
        return self._prefix_hasher.at(self.token_ids, length)

    def hash_tails(self, start: int) -> tuple[bytes, list[int]]:
        """Parts of the prefix hashes of the first ``start`` tokens and more, as ``PrefixHasher.tails`` has them."""
        return self._prefix_hasher.tails(self.token_ids, start, self.length)

    def check_prefix_hash(self) -> None:
        """Raise ``IntegrityError`` unless the incremental hash equals a new hash of all tokens."""
        if self.prefix_hash(self.length) != self._prefix_hasher.anew(self.token_ids):
            raise IntegrityError("a sequence's prefix hash is not its text's")

    def truncate_tokens(self, length: int) -> None:
        """Drop the token ids from ``length`` on. Called by the manager."""
        del self.token_ids[length:]
        self._prefix_hasher.truncate(length)

    def replace_tail(self, length: int, token_ids: Iterable[int]) -> None:
        """Set the token ids from ``length`` on. Called by the manager."""
        self.token_ids[length:] = token_ids
        self._prefix_hasher.truncate(length)

    def amend_last(self, token_id: int) -> None:
        """Set the last token id. Called by the manager."""
        self.token_ids[-1] = token_id
        self._prefix_hasher.truncate(len(self.token_ids) - 1)


def check_sequence(sequence: KVSequence, pool: PagePool, prefix_cache: PrefixCache | None) -> None:
    """Raise ``IntegrityError``, naming the violation, unless an open sequence is consistent."""
    length, num_pages, holes = sequence.length, len(sequence.page_table), sequence.holes
    if not sequence.is_open:
        raise IntegrityError("a released sequence is still in the table")
    if num_pages != pool.pages_for(length):
        raise IntegrityError(f"{num_pages} pages are held for {length} tokens")
    if length > sequence.max_length:
        raise IntegrityError(f"a sequence of {length} tokens has a max_length of {sequence.max_length}")
    sequence.check_prefix_hash()
    if sequence.num_registered_pages > length // pool.page_size:
        raise IntegrityError(f"{sequence.num_registered_pages} pages of {length} tokens are registered")
    if holes and not holes.stop < num_pages:
        raise IntegrityError(
            f"pages {holes.start} to {holes.stop} of {num_pages} were given back, the last one included"
        )
    if prefix_cache is None:
        return
    keys = list(prefix_cache.page_keys(sequence.root_key, sequence.token_ids))
    if sequence.page_keys != keys[: len(sequence.page_keys)]:
        raise IntegrityError("a sequence's page keys are not its text's")
    if holes.stop > sequence.num_registered_pages:
        raise IntegrityError(f"{holes.stop} pages were given back, and {sequence.num_registered_pages} are registered")
