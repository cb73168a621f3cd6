"""Prefix hash of a token sequence, with which a coordinator and a service verify that they hold the same tokens.

The hash of n tokens has two parts: a chain over the full blocks of ``BLOCK_TOKENS`` (keyed BLAKE2b, 128 bits), and a
running hash of the rest (61 bits). It does not depend on the page size. A decoding step usually updates only the
running hash: for a few tokens BLAKE2b takes twice as long, for a block a tenth of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import blake2b

from outrider.cooperative import Work, run
from outrider.types import pack_token_ids

BLOCK_TOKENS = 256
CHAIN_BYTES = 16
MAX_KEY_BYTES = blake2b.MAX_KEY_SIZE

PrefixHash = tuple[bytes, int]
"""The chain, empty without a full block; the running hash of the rest, 0 without a rest."""
EMPTY_PREFIX: PrefixHash = (b"", 0)
"""The hash of no tokens."""

_BLOCKS_BETWEEN_PAUSES = 32
"""Blocks hashed before other tasks of the event loop may run: some 8,000 tokens."""
REST_MULTIPLIER = 1_000_003
REST_BITS = 61
REST_MODULUS = (1 << REST_BITS) - 1
"""Modulus of the running hash h, which after a token t is (h * multiplier + t + 1) modulo this."""


def chain_size(num_tokens: int) -> int:
    """Bytes of the chain of ``num_tokens`` tokens."""
    return CHAIN_BYTES if num_tokens >= BLOCK_TOKENS else 0


def _remainder(number: int) -> int:
    return number % REST_MODULUS


_reduce = hash if sys.hash_info.modulus == REST_MODULUS else _remainder
"""A number of 0 or more modulo ``REST_MODULUS``, which is what Python hashes numbers by on 64 bits: a third of the time
of a division."""


def prefix_hash(token_ids: Sequence[int], key: bytes = b"") -> PrefixHash:
    """Hash of all of ``token_ids``."""
    return PrefixHasher(key).at(token_ids, len(token_ids))


class PrefixHasher:
    """Prefix hashes of one token sequence that mostly grows. Stores no tokens: each call gets the sequence."""

    __slots__ = ("_blocks", "_chain", "_key", "_rest", "_start")

    def __init__(self, key: bytes = b"", chain: bytes = b"") -> None:
        """``chain``: over full blocks that come before the sequence."""
        self._key = key
        self._blocks = [chain]
        """Entry n: the chain over the first n blocks."""
        self._open_block()

    def at(self, token_ids: Sequence[int], length: int) -> PrefixHash:
        """Hash of the first ``length`` of ``token_ids``; tokens that were hashed before must not have changed."""
        rest, place = self._rest, length - self._start
        num_hashed = len(rest)
        if 0 < place < num_hashed:
            return self._chain, rest[place]
        if place <= 0:
            return self._behind(token_ids, length)
        if place >= BLOCK_TOKENS:
            run(self.hash_blocks(token_ids, length))
            return self.at(token_ids, length)
        if place == num_hashed:  # one more, as after a plain step
            rest.append(_reduce(rest[-1] * REST_MULTIPLIER + token_ids[length - 1] + 1))
        else:
            _extend(rest, token_ids[self._start + num_hashed - 1 : length])
        return self._chain, rest[-1]

    def tails(self, token_ids: Sequence[int], start: int, stop: int) -> tuple[bytes, list[int]]:
        """The chain at ``start``, and the running hashes of the first ``start``, ``start`` + 1, ... ``stop`` of
        ``token_ids``, as far as they are of one block: at least the first.
        """
        last = min(stop, start - start % BLOCK_TOKENS + BLOCK_TOKENS - 1)
        chain, rest = self.at(token_ids, last)
        first = start - self._start
        if first < 0:  # the open block is a later one
            chain, rest = self.at(token_ids, start)
            return chain, [rest]
        return chain, self._rest[first : last - self._start + 1]

    def hash_blocks(self, token_ids: Sequence[int], length: int) -> Work[None]:
        """Hash the full blocks of the first ``length`` tokens, with pauses in a long sequence."""
        while (end := BLOCK_TOKENS * len(self._blocks)) <= length:
            block = pack_token_ids(token_ids, end - BLOCK_TOKENS, end)
            chain = blake2b(self._blocks[-1] + block, digest_size=CHAIN_BYTES, key=self._key)
            self._blocks.append(chain.digest())
            self._open_block()
            if len(self._blocks) % _BLOCKS_BETWEEN_PAUSES == 0:
                yield

    def anew(self, token_ids: Sequence[int]) -> PrefixHash:
        """Hash of all of ``token_ids`` with the same key, without cached parts."""
        return PrefixHasher(self._key, self._blocks[0]).at(token_ids, len(token_ids))

    def truncate(self, length: int) -> None:
        """Forget the hashes past ``length`` tokens, which change."""
        num_rest = length - self._start
        if num_rest >= 0:
            del self._rest[num_rest + 1 :]
        else:
            del self._blocks[length // BLOCK_TOKENS + 1 :]
            self._open_block()

    def _open_block(self) -> None:
        self._chain = self._blocks[-1]
        self._start = BLOCK_TOKENS * (len(self._blocks) - 1)
        self._rest = [0]
        """Entry n: the running hash of the first n tokens after ``_start``."""

    def _behind(self, token_ids: Sequence[int], length: int) -> PrefixHash:
        """Hash at a length that is no longer in the open block, which is asked for seldom."""
        num_blocks, num_rest = divmod(length, BLOCK_TOKENS)
        rest = [0]
        _extend(rest, token_ids[length - num_rest : length])
        return self._blocks[num_blocks], rest[-1]


def rest_after(rest: int, length: int, token_ids: Sequence[int]) -> int:
    """Running hash after ``token_ids``, which follow the first ``length`` tokens, whose running hash is ``rest``."""
    for place, token_id in enumerate(token_ids, length + 1):
        rest = _reduce(rest * REST_MULTIPLIER + token_id + 1) if place % BLOCK_TOKENS else 0
    return rest


def following(rest: int, token_ids: Sequence[int]) -> list[int]:
    """``rest`` and the running hashes after each of ``token_ids``, within one block."""
    hashes = [rest]
    _extend(hashes, token_ids)
    return hashes


def _extend(hashes: list[int], token_ids: Sequence[int]) -> None:
    known = hashes[-1]
    for token_id in token_ids:
        known = _reduce(known * REST_MULTIPLIER + token_id + 1)
        hashes.append(known)
