"""Random numbers in plain Python, which is faster than an array library for the few draws of one step.

Imports only the contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from outrider.randomness.streams import KEY_STEPS, LANES, MASK, MULTIPLIERS, ROUNDS, UNIT, Stream, split_seed

Block = tuple[int, int, int, int]

_M0, _M1 = MULTIPLIERS
_W0, _W1 = KEY_STEPS
_MAX_KEYS = 1024
"""Requests whose keys are kept; more than run at a time."""


def philox4x32(counter: Block, key: tuple[int, int]) -> Block:
    """Ten rounds of Philox4x32 on one counter."""
    c0, c1, c2, c3 = counter
    for k0, k1 in _round_keys(key):
        product0 = _M0 * c0
        product1 = _M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK,
        )
    return c0, c1, c2, c3


@lru_cache(maxsize=_MAX_KEYS)
def _round_keys(key: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The key of every round: the same for all counters of a request."""
    k0, k1 = key
    return tuple(((k0 + step * _W0) & MASK, (k1 + step * _W1) & MASK) for step in range(ROUNDS))


def bits(seed: int, stream: Stream, base: int, position: int, token: int = 0) -> int:
    """32 random bits."""
    block = philox4x32((token >> 2, position, base, int(stream)), split_seed(seed))
    return block[token & (LANES - 1)]


def coin(seed: int, stream: Stream, base: int, position: int, token: int = 0) -> float:
    """One uniform in [0, 1)."""
    return bits(seed, stream, base, position, token) * UNIT


def coins(seed: int, stream: Stream, base: int, positions: Iterable[int]) -> list[float]:
    """The uniforms in [0, 1) of several positions, token 0."""
    key = split_seed(seed)
    code = int(stream)
    return [philox4x32((0, position, base, code), key)[0] * UNIT for position in positions]
