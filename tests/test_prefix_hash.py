"""Prefix hashes against their definition, computed anew for every length."""

from __future__ import annotations

import random
import struct
from hashlib import blake2b

import pytest

from outrider.prefix_hash import (
    BLOCK_TOKENS,
    EMPTY_PREFIX,
    PrefixHash,
    PrefixHasher,
    prefix_hash,
)

KEY = bytes(range(16))


def defined_hash(token_ids: list[int], key: bytes) -> PrefixHash:
    """The definition of docs/protocol.md, word by word."""
    chain, rest = b"", 0
    num_full = len(token_ids) // 256 * 256
    for start in range(0, num_full, 256):
        block = struct.pack("<256i", *token_ids[start : start + 256])
        chain = blake2b(chain + block, digest_size=16, key=key).digest()
    for token_id in token_ids[num_full:]:
        rest = (rest * 1_000_003 + token_id + 1) % (2**61 - 1)
    return chain, rest


def text_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2**31) for _ in range(length)]


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 511, 512, 513, 1000])
@pytest.mark.parametrize("key", [b"", KEY])
def test_the_hash_is_a_chain_over_blocks_and_the_rest(length: int, key: bytes) -> None:
    text = text_of(length)
    assert prefix_hash(text, key) == defined_hash(text, key)
    assert (prefix_hash(text, key) == EMPTY_PREFIX) == (length == 0)


def test_growing_asking_behind_and_truncating_give_what_hashing_anew_gives() -> None:
    rng = random.Random(5)
    text: list[int] = []
    hasher = PrefixHasher(KEY)
    for _ in range(1_000):
        if rng.random() < 0.1:
            length = rng.randint(max(0, len(text) - 600), len(text))
            del text[length:]
            hasher.truncate(length)
        text += text_of(rng.choice((1, 1, 2, 5, 40, 300)) if len(text) < 2_000 else 0, seed=rng.getrandbits(30))
        asked = rng.randint(0, len(text))
        assert hasher.at(text, asked) == defined_hash(text[:asked], KEY)


def test_hashing_a_long_sequence_has_pauses() -> None:
    text, hasher = text_of(100 * BLOCK_TOKENS + 3), PrefixHasher(KEY)
    assert sum(1 for _ in hasher.hash_blocks(text, len(text))) == 3
    assert hasher.at(text, len(text)) == defined_hash(text, KEY)


def test_another_key_another_token_and_another_length_give_another_hash() -> None:
    text = text_of(300)
    hashes = {prefix_hash(text, KEY), prefix_hash(text), prefix_hash(text[:-1], KEY)}
    hashes |= {prefix_hash([*text[:i], text[i] ^ 1, *text[i + 1 :]], KEY) for i in (0, 255, 256, 299)}
    assert len(hashes) == 7
