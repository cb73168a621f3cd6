"""Integrity of a KV sequence: its page table, keys and hash, checked against its tokens. For tests and debugging."""

from __future__ import annotations

from outrider.errors import IntegrityError
from outrider.kv_cache.page_pool import PagePool
from outrider.kv_cache.prefix_cache import PrefixCache
from outrider.kv_cache.sequence import KVSequence


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
