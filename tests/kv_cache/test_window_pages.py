"""Window pages: a sequence that is alone grows to the last page of both pools, and begins after any cached prefix."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest

from outrider.errors import InvalidRequestError, OutOfPagesError
from outrider.kv_cache import AttentionReach, KVCacheManager, KVSequence, PagePool, WindowPages
from outrider.kv_cache.window_pages import num_window_pages

PAGE_SIZE, NUM_PAGES, CHUNK = 4, 300, 256
LONGEST = NUM_PAGES * PAGE_SIZE
REACH = AttentionReach(window=9, num_rewind_tokens=8)
LEAST = num_window_pages(REACH, CHUNK, PAGE_SIZE)
"""Window pages of a cache for one sequence: fewer than two chunks have tokens for."""


def manager_of(num_window_pages: int = LEAST) -> KVCacheManager:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    return KVCacheManager(pool, window=WindowPages(num_window_pages, pool, REACH, forward_tokens=CHUNK))


def forward(manager: KVCacheManager, sequence: KVSequence, token_ids: list[int]) -> None:
    """Extend a sequence as a forward does."""
    start = sequence.length
    manager.reserve([sequence], [start], [len(token_ids)])
    manager.replace_tails([sequence], [start], [token_ids])
    manager.confirm_copies()
    manager.check_integrity()


def prefill(manager: KVCacheManager, sequence: KVSequence, token_ids: list[int]) -> None:
    for start in range(sequence.length, len(token_ids), CHUNK):
        forward(manager, sequence, token_ids[start : start + CHUNK])
    manager.commit(sequence, sequence.length)


def test_a_chunk_fits_into_the_window_pages_that_its_sequence_leaves() -> None:
    assert 2 * CHUNK // PAGE_SIZE > LEAST
    manager = manager_of()
    sequence = manager.open(LONGEST)
    for start in range(0, LONGEST, CHUNK):
        count = min(CHUNK, LONGEST - start)
        assert manager.fit([(sequence, count)])
        forward(manager, sequence, [1] * count)
    assert not manager.pool.num_free


def test_decode_steps_fit_up_to_the_last_page() -> None:
    manager = manager_of()
    sequence = manager.open(LONGEST)
    prefill(manager, sequence, [1] * (LONGEST - 40))
    for length in range(LONGEST - 40, LONGEST):
        assert manager.fit([(sequence, 1)])
        forward(manager, sequence, [length])
        manager.commit(sequence, length + 1)


@pytest.mark.parametrize("seed", range(4))
def test_sequences_fit_where_a_forward_finds_pages_for_all(seed: int) -> None:
    """Forks and cached prefixes among them: what another holds is not free when one leaves it."""
    choose, manager = random.Random(seed), manager_of(LEAST // 2)
    sequences, outcomes = list[KVSequence](), Counter[str]()
    for _ in range(400):
        begin(manager, sequences, choose)
        growths = [(one, choose.choice((1, 1, 5, 40))) for one in choose.sample(sequences, min(3, len(sequences)))]
        growths = [(one, min(count, LONGEST - one.length)) for one, count in growths if one.length < LONGEST]
        if not growths:
            continue
        lengths, counts = [one.length for one, _ in growths], [count for _, count in growths]
        fits, owners = manager.fit(growths), [one for one, _ in growths]
        try:
            manager.reserve(owners, lengths, counts)
        except OutOfPagesError:
            assert not fits
            outcomes["none"] += 1
            manager.release(sequences.pop(choose.randrange(len(sequences))))
        else:
            outcomes["right" if fits else "too careful"] += 1
            manager.replace_tails(owners, lengths, [[choose.randrange(2) for _ in range(count)] for count in counts])
            for one in owners:
                manager.commit(one, one.length - choose.randrange(min(9, one.length)))
        manager.confirm_copies()
        manager.check_integrity()
    assert outcomes["right"] > 20 * outcomes["too careful"]
    assert outcomes["none"]


def begin(manager: KVCacheManager, sequences: list[KVSequence], choose: random.Random) -> None:
    """A new sequence, a fork or one that ends; or one that is cut."""
    kind = choose.random()
    if kind < 0.1 or not sequences:
        sequences.append(manager.open(LONGEST))
        manager.adopt_prefix(sequences[-1], [1] * choose.randrange(1, 200))
    elif kind < 0.2:
        sequences.append(manager.fork(choose.choice(sequences), LONGEST))
    elif kind < 0.25:
        manager.release(sequences.pop(choose.randrange(len(sequences))))
    elif kind < 0.5:
        sequence = choose.choice(sequences)
        with contextlib.suppress(InvalidRequestError):  # pages were given back
            manager.truncate(sequence, max(0, sequence.length - choose.randrange(8)))


def test_a_sequence_alone_is_admitted_after_any_cached_prefix() -> None:
    text = list(range(LONGEST))
    for length in (LONGEST, LONGEST - PAGE_SIZE, LONGEST // 2, CHUNK, 50):
        manager = manager_of()
        first = manager.open(LONGEST)
        prefill(manager, first, text[:length])
        manager.release(first)
        second = manager.open(LONGEST)
        assert manager.adopt_prefix(second, text)
        assert manager.fits_alone(second, LONGEST - second.length)
        prefill(manager, second, text)
        assert second.length == LONGEST


def test_all_that_is_adopted_is_enough_to_go_on() -> None:
    """The window ends where a page does: there is no token to spare."""
    assert (REACH.window - 1) % PAGE_SIZE == 0
    manager = manager_of()
    window = manager.window
    assert window is not None
    first, text = manager.open(LONGEST), list(range(101))
    prefill(manager, first, text)
    manager.release(first)
    taken = window.pool.allocate(window.pool.num_free - 3)  # the window pages of the text but for the newest are lost
    second = manager.open(LONGEST)
    adopted = manager.adopt_prefix(second, text)
    assert adopted
    window.pool.release(taken)
    manager.truncate(second, adopted)
    forward(manager, second, text[adopted:])
