"""Texts without KV: what a session of a draft without a model holds.

Owns their tokens and running hashes. A ``SequenceStore`` of the ledger, without pages, so nothing is ever refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.types import running_hashes


class PlainSequence:
    """Tokens of one session, 32 bits each."""

    __slots__ = ("_hashes", "token_ids")

    def __init__(self) -> None:
        self.token_ids: array[int] = array("i")
        self._hashes = [0]  # of the lengths 0, 1, ... as far as anybody asked

    @property
    def length(self) -> int:
        """How many tokens."""
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self.token_ids.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        del self.token_ids[length:]
        del self._hashes[length + 1 :]

    def prefix_hash(self, length: int) -> int:
        """``extend_prefix_hash(0, first length tokens)``; each token is hashed once."""
        hashes = self._hashes
        if len(hashes) <= length:
            hashes += running_hashes(hashes[-1], self.token_ids[len(hashes) - 1 : length])
        return hashes[length]


class PlainSequences:
    """All texts of a service."""

    def open(self, max_length: int, cache_salt: str = "") -> PlainSequence:
        """An empty text."""
        return PlainSequence()

    def adopt_prefix(self, sequence: PlainSequence, token_ids: Sequence[int]) -> int:
        """Nothing: there is no KV to be shared."""
        return 0

    def num_pages(self, sequence: PlainSequence) -> int:
        """None."""
        return 0

    def commit(self, sequence: PlainSequence, length: int) -> None:
        """Nothing follows from it."""

    def truncate(self, sequence: PlainSequence, length: int) -> None:
        """Keep the first ``length`` tokens."""
        sequence.truncate(length)

    def prefix_hash(self, sequence: PlainSequence, length: int) -> int:
        """``extend_prefix_hash(0, first length tokens)``."""
        return sequence.prefix_hash(length)

    def release(self, sequence: PlainSequence) -> None:
        """Nothing is held besides the text itself."""
