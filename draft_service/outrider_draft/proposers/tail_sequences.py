"""Sequences of a draft model: a text, and the KV of all of it or of its end.

A model with an attention window sees little of a long text. So of one that is brought anew it computes the end alone,
as if the text began there: positions count from there, and the first tokens of the end are those that are attended to
beside the window. That changes how often its tokens are accepted, and never what is generated.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.errors import InvalidRequestError
from outrider.kv_cache import KVCacheManager, KVSequence
from outrider.prefix_hash import BLOCK_TOKENS, PrefixHash, prefix_hash


def tail_stride(window: int) -> int:
    """The text that is left out grows in such steps, so that a text which grows a little finds its KV in the prefix
    cache: half a window, in whole blocks of the prefix hash.
    """
    return max(1, window // 2 // BLOCK_TOKENS) * BLOCK_TOKENS


def longest_tail(window: int) -> int:
    """Tokens that are computed of a new text, at most."""
    return window + tail_stride(window)


class TailSequence:
    """One session's text: ``head``, which is not computed, and the tokens of ``kv``."""

    __slots__ = ("cache_salt", "head", "kv", "max_length", "prefix_hash_key")

    def __init__(self, kv: KVSequence, max_length: int, cache_salt: str, prefix_hash_key: bytes) -> None:
        self.kv, self.max_length = kv, max_length
        self.cache_salt, self.prefix_hash_key = cache_salt, prefix_hash_key
        self.head: array[int] = array("i")
        """Whole blocks of the prefix hash."""

    @property
    def kv_offset(self) -> int:
        """First tokens of the text that ``kv`` lacks."""
        return len(self.head)

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self.head) + len(self.kv.token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The text."""
        return [*self.head, *self.kv.token_ids] if self.head else self.kv.token_ids


class TailSequences:
    """All of a draft model; a ``SequenceStore``."""

    def __init__(self, manager: KVCacheManager, window: int | None = None) -> None:
        """``window``: tokens that the model attends to, the last ones; None: all, and texts are computed as a whole."""
        self.manager, self.window = manager, window

    def open(self, max_length: int, cache_salt: str = "", prefix_hash_key: bytes = b"") -> TailSequence:
        """An empty text."""
        kv = self.manager.open(max_length, cache_salt, prefix_hash_key)
        return TailSequence(kv, max_length, cache_salt, prefix_hash_key)

    def adopt_prefix(self, sequence: TailSequence, token_ids: Sequence[int]) -> int:
        """Leave out the head of a long text, and give an empty sequence what is cached of the rest; how many tokens it
        then has.
        """
        kv_offset = self.kv_offset_of(len(token_ids))
        if kv_offset:
            self._restart(sequence, token_ids[:kv_offset])
        return kv_offset + self.manager.adopt_prefix(sequence.kv, token_ids[kv_offset:] if kv_offset else token_ids)

    def num_pages(self, sequence: TailSequence) -> int:
        """KV pages that it holds."""
        return self.manager.num_pages(sequence.kv)

    def commit(self, sequence: TailSequence, length: int) -> None:
        """The first ``length`` tokens are final: others may share their KV."""
        self.manager.commit(sequence.kv, length - sequence.kv_offset)

    def truncate(self, sequence: TailSequence, length: int) -> None:
        """Keep the first ``length`` tokens. ``InvalidRequestError``, without a change, if KV that the next ones attend
        to was left out or given back.
        """
        if 0 < length <= sequence.kv_offset:
            raise InvalidRequestError(
                "length", f"the first {sequence.kv_offset} tokens were left out, and not computed"
            )
        if sequence.kv_offset and not length:
            self._restart(sequence, ())
        self.manager.truncate(sequence.kv, max(0, length - sequence.kv_offset))

    def prefix_hash(self, sequence: TailSequence, length: int) -> PrefixHash:
        """Hash of the first ``length`` tokens."""
        if length < sequence.kv_offset:
            return prefix_hash(sequence.head[:length], sequence.prefix_hash_key)
        return self.manager.prefix_hash(sequence.kv, length - sequence.kv_offset)

    def hash_tails(self, sequence: TailSequence, start: int) -> tuple[bytes, list[int]]:
        """The chain of the first ``start`` tokens, which are more than were left out, and the running hashes from there
        on, within their block.
        """
        return self.manager.hash_tails(sequence.kv, start - sequence.kv_offset)

    def release(self, sequence: TailSequence) -> None:
        """Give back what it takes."""
        self.manager.release(sequence.kv)

    def kv_offset_of(self, length: int) -> int:
        """Tokens of a text of that length before its tail; 0 without a window."""
        if self.window is None:
            return 0
        stride = tail_stride(self.window)
        return max(0, length - self.window) // stride * stride

    def _restart(self, sequence: TailSequence, head: Sequence[int]) -> None:
        """Begin anew behind a head."""
        self.manager.release(sequence.kv)
        sequence.head = array("i", head)
        chain, _ = prefix_hash(sequence.head, sequence.prefix_hash_key)
        sequence.kv = self.manager.open(
            sequence.max_length - sequence.kv_offset, sequence.cache_salt, sequence.prefix_hash_key, chain
        )
