"""Prefix hash of a token sequence, by which a coordinator and a service know that they hold the same tokens.

The hash of n tokens has two parts: a chain over their full blocks of ``BLOCK_TOKENS`` (keyed BLAKE2b, 128 bits), and a
running hash of the rest (61 bits). It depends on no page size. A step of decoding adds to the running hash alone: for a
few tokens BLAKE2b costs twice as much, for a block a tenth.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from outrider.cooperative import Work, run

BLOCK_TOKENS = 256
CHAIN_BYTES = 16
MAX_KEY_BYTES = blake2b.MAX_KEY_SIZE

PrefixHash = tuple[bytes, int]
"""The chain, empty without a full block; the running hash of the rest, 0 without a rest."""
EMPTY_PREFIX: PrefixHash = (b"", 0)
"""The hash of no tokens."""

_BLOCK = struct.Struct(f"<{BLOCK_TOKENS}i")
_BLOCKS_BETWEEN_PAUSES = 32
_MULTIPLIER = 1_000_003
_MODULUS = (1 << 61) - 1


def prefix_hash(token_ids: Sequence[int], key: bytes = b"") -> PrefixHash:
    """Hash of all of ``token_ids``."""
    return PrefixHasher(key).at(token_ids, len(token_ids))


class PrefixHasher:
    """Prefix hashes of one token sequence that mostly grows. Holds no tokens: each call brings the sequence."""

    __slots__ = ("_blocks", "_chain", "_key", "_rest", "_start")

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self._blocks = [b""]
        """Entry n: the chain over the first n blocks."""
        self._open_block()

    def at(self, token_ids: Sequence[int], length: int) -> PrefixHash:
        """Hash of the first ``length`` of ``token_ids``; those that were hashed before must not have changed."""
        place, rest = length - self._start, self._rest
        if place >= len(rest):
            if place >= BLOCK_TOKENS:
                run(self.hash_blocks(token_ids, length))
                return self.at(token_ids, length)
            _extend(rest, token_ids[self._start + len(rest) - 1 : length])
        if place > 0:
            return self._chain, rest[place]
        return self._behind(token_ids, length)

    def hash_blocks(self, token_ids: Sequence[int], length: int) -> Work[None]:
        """Hash the full blocks of the first ``length`` tokens, with pauses in a long sequence."""
        while (end := BLOCK_TOKENS * len(self._blocks)) <= length:
            block = _BLOCK.pack(*token_ids[end - BLOCK_TOKENS : end])
            chain = blake2b(self._blocks[-1] + block, digest_size=CHAIN_BYTES, key=self._key)
            self._blocks.append(chain.digest())
            self._open_block()
            if len(self._blocks) % _BLOCKS_BETWEEN_PAUSES == 0:
                yield

    def anew(self, token_ids: Sequence[int]) -> PrefixHash:
        """Hash of all of ``token_ids`` by the same key, whatever was hashed before."""
        return prefix_hash(token_ids, self._key)

    def truncate(self, length: int) -> None:
        """Forget the hashes past ``length`` tokens: what stands there changes."""
        num_blocks, num_rest = divmod(length, BLOCK_TOKENS)
        if num_blocks < len(self._blocks) - 1:
            del self._blocks[num_blocks + 1 :]
            self._open_block()
        else:
            del self._rest[num_rest + 1 :]

    def _open_block(self) -> None:
        self._chain = self._blocks[-1]
        self._start = BLOCK_TOKENS * (len(self._blocks) - 1)
        self._rest = [0]
        """Entry n: the running hash of the first n tokens after ``_start``."""

    def _behind(self, token_ids: Sequence[int], length: int) -> PrefixHash:
        """Of a length that is no longer in the open block, which is asked for seldom."""
        num_blocks, num_rest = divmod(length, BLOCK_TOKENS)
        rest = [0]
        _extend(rest, token_ids[length - num_rest : length])
        return self._blocks[num_blocks], rest[-1]


def _extend(hashes: list[int], token_ids: Sequence[int]) -> None:
    known = hashes[-1]
    for token_id in token_ids:
        known = (known * _MULTIPLIER + token_id + 1) % _MODULUS
        hashes.append(known)
