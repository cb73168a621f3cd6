"""The random streams in numpy. Imports neither torch nor triton: the coordinator has none.

``random_bits``, ``uniform`` and ``gumbel`` broadcast their arguments. ``row_bits`` and ``token_bits`` serve a batch of
rows, each with its own seed and position, and compute each Philox block once. For the few coins of one step ``coins``
(plain Python) is the quickest form.

Shape letters: ``N`` rows, ``V`` vocabulary, ``S`` tokens chosen in each row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.randomness.scalar import coin, coins
from outrider.randomness.streams import KEY_STEPS, LANES, LARGEST_UNIT, MASK, MULTIPLIERS, ROUNDS, UNIT

__all__ = ["coin", "coins", "gumbel", "random_bits", "row_bits", "token_bits", "uniform"]

Words = NDArray[np.uint64]
"""32-bit numbers in 64-bit words, so that a product of two fits."""
Bits = NDArray[np.uint32]

_MASK = np.uint64(MASK)
_HALF = np.uint64(32)
_BLOCKS_AT_ONCE = 8192
"""Intermediate arrays stay in cache: half the time of whole rows for a large vocabulary or many rows."""
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)[:, None, None]
_TURNS = np.array([[turn * step & MASK for step in KEY_STEPS] for turn in range(ROUNDS)], dtype=np.uint64)

_STEPS = _TURNS.astype(np.uint32)[:, :, None, None]


def row_bits(words: Words, num_tokens: int) -> Bits:  # [5, N, 1] -> [N, V]
    """32 random bits for every token below ``num_tokens``; ``words``: low and high key, position, base, stream."""
    num_rows, num_blocks = words.shape[1], -(-num_tokens // LANES)
    bits = np.empty((num_rows, num_blocks, LANES), dtype=np.uint32)
    rows_at_once = max(1, _BLOCKS_AT_ONCE // max(num_blocks, 1))
    for row in range(0, num_rows, rows_at_once):
        for block in range(0, num_blocks, _BLOCKS_AT_ONCE):
            part = bits[row : row + rows_at_once, block : block + _BLOCKS_AT_ONCE]
            blocks = np.arange(block, block + part.shape[1], dtype=np.uint32)
            _fill(part, words[:, row : row + rows_at_once], blocks)
    return bits.reshape(num_rows, num_blocks * LANES)[:, :num_tokens]


def token_bits(words: Words, token_ids: NDArray[np.integer]) -> Bits:  # [5, N, 1], [N, S] -> [N, S]
    """32 random bits for the given tokens of each row; ``words`` as for ``row_bits``."""
    bits = np.empty((*token_ids.shape, LANES), dtype=np.uint32)
    _fill(bits, words, token_ids >> 2)
    lanes = (token_ids & (LANES - 1)).astype(np.intp).ravel()
    return bits.ravel().take(np.arange(0, bits.size, LANES) + lanes).reshape(token_ids.shape)


def _fill(bits: Bits, words: Words, blocks: NDArray[np.integer]) -> None:  # [N, B, 4], [5, N, 1], [N or 1, B]
    """Ten rounds of Philox4x32, both halves of a round at once, in 32-bit words.

    The halves of a product are read as what they are in memory (low word first: little-endian machines), and a
    product's swapped halves are a view turned round.
    """
    shape = (2, *bits.shape[:2])
    key, (position, base, stream) = words[:2].astype(np.uint32), words[2:]
    factors, others = np.empty(shape, dtype=np.uint32), np.empty(shape, dtype=np.uint32)
    factors[0], factors[1] = blocks, base
    others[0], others[1] = position, stream
    products = [np.empty(shape, dtype=np.uint64) for _ in range(2)]
    swapped = [product.view(np.uint32).reshape(*shape, 2)[::-1] for product in products]
    halves = [(half[..., 0], half[..., 1]) for half in swapped]
    for turn, round_key in enumerate(key + _STEPS):
        low, high = halves[turn % 2]
        np.multiply(factors, _MULTIPLIERS, out=products[turn % 2])
        np.bitwise_xor(others, round_key, out=factors)
        np.bitwise_xor(factors, high, out=factors)
        others = low
    bits[..., 0], bits[..., 1], bits[..., 2], bits[..., 3] = factors[0], others[0], factors[1], others[1]


def random_bits(seed: ArrayLike, stream: ArrayLike, base: ArrayLike, position: ArrayLike, token: ArrayLike = 0) -> Bits:
    """32 random bits for each element of the broadcast arguments; ``stream`` may be an array too."""
    seeds = np.asarray(seed).astype(np.uint64)
    shape = np.broadcast(seeds, stream, base, position, token).shape
    words = np.empty((6, *shape), dtype=np.uint64)
    words[0], words[1] = seeds & _MASK, seeds >> _HALF
    words[2], words[3], words[4], words[5] = position, base, stream, token
    rows = words.reshape(6, -1, 1)
    return token_bits(rows[:5], rows[5]).reshape(shape)


def uniform(
    seed: ArrayLike, stream: ArrayLike, base: ArrayLike, position: ArrayLike, token: ArrayLike = 0
) -> NDArray[np.float64]:
    """Uniforms in [0, 1), exact in float64."""
    return np.asarray(random_bits(seed, stream, base, position, token) * np.float64(UNIT))


def gumbel(
    seed: ArrayLike, stream: ArrayLike, base: ArrayLike, position: ArrayLike, token: ArrayLike = 0
) -> NDArray[np.float32]:
    """Standard Gumbel noise, by the contract's formula in float32."""
    words = random_bits(seed, stream, base, position, token).astype(np.float32)
    units = np.minimum((words + np.float32(0.5)) * np.float32(UNIT), np.float32(LARGEST_UNIT))
    return np.asarray(-np.log(-np.log1p(-units)), dtype=np.float32)
