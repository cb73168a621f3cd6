"""Sequences of a draft head: a text, and the KV of its pairs.

Pair i is token i + 1 beside the target's hidden state of position i, so a text of n tokens has n - 1 pairs, and the KV
sequence holds the text without its first token. That one is part of the cache salt: a cached page is found by all that
its keys and values depend on.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.kv_cache import KVCacheManager, KVSequence
from outrider.prefix_hash import PrefixHash
from outrider_draft.texts import PlainSequence


class StateSequence:
    """One session's text and pairs."""

    __slots__ = ("cache_salt", "kv", "max_length", "text")

    def __init__(self, max_length: int, cache_salt: str, prefix_hash_key: bytes) -> None:
        self.max_length, self.cache_salt = max_length, cache_salt
        self.text = PlainSequence(prefix_hash_key)
        self.kv: KVSequence | None = None
        """None until its first token is known."""

    @property
    def length(self) -> int:
        """Tokens of the text, whose pairs are all computed."""
        return self.text.length

    @property
    def token_ids(self) -> Sequence[int]:
        """The text."""
        return self.text.token_ids


class StateSequences:
    """All of a head; a ``SequenceStore``."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager

    def open(self, max_length: int, cache_salt: str = "", prefix_hash_key: bytes = b"") -> StateSequence:
        """An empty text."""
        return StateSequence(max_length, cache_salt, prefix_hash_key)

    def begin(self, sequence: StateSequence, first_token_id: int) -> KVSequence:
        """The KV of a text that begins so."""
        if sequence.kv is None:
            salt = f"{first_token_id}:{sequence.cache_salt}"
            sequence.kv = self.manager.open(sequence.max_length, salt)
        return sequence.kv

    def adopt_prefix(self, sequence: StateSequence, token_ids: Sequence[int]) -> int:
        """Give an empty text what is cached of its pairs; how many tokens it then has."""
        self._drop(sequence)
        sequence.text.truncate(0)
        num_pairs = self.manager.adopt_prefix(self.begin(sequence, token_ids[0]), token_ids[1:])
        if not num_pairs:
            return 0
        sequence.text.extend(token_ids[: num_pairs + 1])
        return num_pairs + 1

    def num_pages(self, sequence: StateSequence) -> int:
        """KV pages that it holds."""
        return 0 if sequence.kv is None else self.manager.num_pages(sequence.kv)

    def commit(self, sequence: StateSequence, length: int) -> None:
        """The pairs of the first ``length`` tokens are final: others may share them."""
        if sequence.kv is not None and length > 1:
            self.manager.commit(sequence.kv, length - 1)

    def truncate(self, sequence: StateSequence, length: int) -> None:
        """Keep the first ``length`` tokens and their pairs."""
        sequence.text.truncate(length)
        self.keep_pairs(sequence, max(0, length - 1))

    def keep_pairs(self, sequence: StateSequence, num_pairs: int) -> None:
        """Keep this many pairs at most."""
        if sequence.kv is not None and sequence.kv.length > num_pairs:
            self.manager.truncate(sequence.kv, num_pairs)

    def prefix_hash(self, sequence: StateSequence, length: int) -> PrefixHash:
        """Hash of the first ``length`` tokens."""
        return sequence.text.prefix_hash(length)

    def hash_tails(self, sequence: StateSequence, start: int) -> tuple[bytes, list[int]]:
        """The chain at ``start``, and running hashes from there on."""
        return sequence.text.hash_tails(start)

    def release(self, sequence: StateSequence) -> None:
        """Give back what it takes."""
        self._drop(sequence)

    def _drop(self, sequence: StateSequence) -> None:
        if sequence.kv is not None:
            self.manager.release(sequence.kv)
            sequence.kv = None
