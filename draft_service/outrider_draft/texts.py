"""Token sequences without KV, for drafts without a model.

Own tokens and prefix hashes. A ``SequenceStore`` without pages, so nothing is ever refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.prefix_hash import PrefixHash, PrefixHasher


class PlainSequence:
    """Tokens of one session, 32 bits each."""

    __slots__ = ("_prefix_hasher", "token_ids")

    def __init__(self, prefix_hash_key: bytes = b"") -> None:
        self.token_ids: array[int] = array("i")
        self._prefix_hasher = PrefixHasher(prefix_hash_key)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self.token_ids.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Truncate to the first ``length`` tokens."""
        del self.token_ids[length:]
        self._prefix_hasher.truncate(length)

    def prefix_hash(self, length: int) -> PrefixHash:
        """Prefix hash of the first ``length`` tokens; each token is hashed once."""
        return self._prefix_hasher.at(self.token_ids, length)

    def hash_tails(self, start: int) -> tuple[bytes, list[int]]:
        """Parts of the prefix hashes of the first ``start`` tokens and more, as ``PrefixHasher.tails`` has them."""
        return self._prefix_hasher.tails(self.token_ids, start, self.length)


class PlainSequences:
    """All sequences of a service."""

    def open(self, max_length: int, cache_salt: str = "", prefix_hash_key: bytes = b"") -> PlainSequence:
        """Open an empty sequence."""
        return PlainSequence(prefix_hash_key)

    def adopt_prefix(self, sequence: PlainSequence, token_ids: Sequence[int]) -> int:
        """Return 0: there is no KV to share."""
        return 0

    def num_pages(self, sequence: PlainSequence) -> int:
        """Return 0."""
        return 0

    def commit(self, sequence: PlainSequence, length: int) -> None:
        """No effect."""

    def truncate(self, sequence: PlainSequence, length: int) -> None:
        """Truncate to the first ``length`` tokens."""
        sequence.truncate(length)

    def prefix_hash(self, sequence: PlainSequence, length: int) -> PrefixHash:
        """Prefix hash of the first ``length`` tokens."""
        return sequence.prefix_hash(length)

    def hash_tails(self, sequence: PlainSequence, start: int) -> tuple[bytes, list[int]]:
        """The chain at ``start``, and running hashes from there on."""
        return sequence.hash_tails(start)

    def release(self, sequence: PlainSequence) -> None:
        """No effect: nothing besides the tokens is held."""
