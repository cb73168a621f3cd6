"""Sequences of the KV cache manager: pages as they grow, shared prefixes, copies before writes."""

from __future__ import annotations

import random

import pytest

from outrider.errors import IntegrityError, InvalidRequestError, OutOfPagesError
from outrider.kv_cache import KVCacheManager, KVSequence, PagePool
from outrider.kv_cache.sequence import check_sequence
from outrider.prefix_hash import EMPTY_PREFIX, prefix_hash

TEXT = list(range(100, 116))


def make_manager(num_pages: int = 16, page_size: int = 4, *, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(PagePool(num_pages, page_size), prefix_caching=prefix_caching)


def hold(manager: KVCacheManager, tokens: list[int], *, salt: str = "", committed: int = 0) -> KVSequence:
    """A sequence that was given ``tokens`` with the help of the prefix cache."""
    sequence = manager.open(64, salt)
    manager.extend(sequence, tokens[manager.adopt_prefix(sequence, tokens) :])
    manager.commit(sequence, committed)
    return sequence


def test_a_sequence_takes_pages_as_it_grows() -> None:
    manager = make_manager()
    sequence = manager.open(30)
    assert (list(sequence.page_table), manager.pool.num_free) == ([], 16)
    slots = manager.extend(sequence, list(range(10)))
    assert slots == [sequence.page_table[p // 4] * 4 + p % 4 for p in range(10)]
    assert (manager.pool.num_used, sequence.num_computed_tokens) == (3, 10)
    assert manager.extend(sequence, []) == []
    manager.truncate(sequence, 4)
    assert (manager.pool.num_used, sequence.token_ids) == (1, [0, 1, 2, 3])
    manager.release(sequence)
    assert (manager.pool.num_free, len(manager)) == (16, 0)
    manager.check_integrity()


def test_growing_past_max_length_or_the_pool_is_refused_and_changes_nothing() -> None:
    manager = make_manager(num_pages=2)
    sequence, long = manager.open(5), manager.open(20)
    manager.extend(sequence, [1, 2, 3])
    with pytest.raises(InvalidRequestError, match="3 more tokens after 3 pass the max_length of 5"):
        manager.extend(sequence, [4, 5, 6])
    with pytest.raises(OutOfPagesError):
        manager.extend(long, list(range(5)))
    assert (sequence.token_ids, long.token_ids, manager.pool.num_free) == ([1, 2, 3], [], 1)
    manager.check_integrity()


def test_truncating_more_than_is_held_is_refused() -> None:
    manager = make_manager()
    sequence = manager.open(9)
    manager.extend(sequence, [1, 2, 3])
    for length in (-1, 4):
        with pytest.raises(InvalidRequestError, match="cannot keep"):
            manager.truncate(sequence, length)


def test_a_released_sequence_cannot_be_used() -> None:
    manager = make_manager()
    sequence = manager.open(4)
    manager.release(sequence)
    for use in (manager.release, lambda one: manager.extend(one, [1]), lambda one: manager.truncate(one, 0)):
        with pytest.raises(InvalidRequestError, match="was released"):
            use(sequence)
    with pytest.raises(InvalidRequestError, match="another cache"):
        make_manager().extend(manager.open(4), [1])
    with pytest.raises(InvalidRequestError, match="must be at least 1"):
        manager.open(0)


def test_a_new_sequence_begins_after_the_longest_run_of_committed_pages() -> None:
    manager = make_manager()
    first = hold(manager, TEXT, committed=13)
    second = hold(manager, [*TEXT[:12], 1, 2, 3, 4, 5])
    assert second.num_cached_tokens == 12
    assert second.page_table[:3] == first.page_table[:3]
    assert manager.pool.num_used == 4 + 2
    third = hold(manager, [*TEXT[:4], 9, 9, 9, 9])
    assert third.num_cached_tokens == 4
    manager.check_integrity()


def test_at_least_one_token_is_left_to_compute() -> None:
    manager = make_manager()
    hold(manager, TEXT[:8], committed=8)
    assert hold(manager, TEXT[:8]).num_cached_tokens == 4
    assert hold(manager, TEXT[:9]).num_cached_tokens == 8
    assert hold(manager, TEXT[:1]).num_cached_tokens == 0
    assert manager.adopt_prefix(manager.open(4), []) == 0


def test_tokens_that_are_not_committed_are_never_found() -> None:
    manager = make_manager()
    first = hold(manager, TEXT, committed=7)
    assert hold(manager, TEXT).num_cached_tokens == 4
    manager.truncate(first, 7)
    manager.extend(first, [1, 2, 3, 4, 5])
    manager.commit(first, 12)
    assert hold(manager, TEXT).num_cached_tokens == 4
    assert hold(manager, [*TEXT[:7], 1, 2, 3, 4, 5, 6]).num_cached_tokens == 12


def test_released_pages_are_found_until_they_are_needed() -> None:
    manager = make_manager(num_pages=4)
    manager.release(hold(manager, TEXT[:12], committed=12))
    assert manager.pool.num_free == 4
    again = hold(manager, TEXT[:13])
    assert again.num_cached_tokens == 12
    manager.release(again)
    manager.release(hold(manager, [1] * 8))
    assert hold(manager, TEXT[:13]).num_cached_tokens == 8  # the last page was evicted, the first were not
    assert manager.prefix_cache is not None
    assert manager.prefix_cache.num_evicted_pages == 1
    manager.check_integrity()


def test_salts_share_no_page() -> None:
    manager = make_manager()
    hold(manager, TEXT[:8], salt="one", committed=8)
    assert hold(manager, TEXT[:9], salt="two").num_cached_tokens == 0
    assert hold(manager, TEXT[:9]).num_cached_tokens == 0
    assert hold(manager, TEXT[:9], salt="one").num_cached_tokens == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(prefix_caching=False)
    hold(manager, TEXT[:8], committed=8)
    assert hold(manager, TEXT[:9]).num_cached_tokens == 0
    assert manager.prefix_cache is None
    manager.check_integrity()


def test_writing_into_a_page_that_can_be_found_gives_it_up_for_a_copy() -> None:
    manager = make_manager()
    sequence = hold(manager, TEXT[:8], committed=8)
    given_up = sequence.page_table[1]
    manager.truncate(sequence, 6)
    assert manager.pending_copies() == []
    manager.extend(sequence, [1, 2])
    assert sequence.page_table[1] != given_up
    assert manager.pending_copies() == [(given_up, sequence.page_table[1])]
    assert hold(manager, TEXT[:9]).page_table[1] == given_up
    manager.check_integrity()


def test_a_pool_without_other_pages_gives_the_page_back_and_nothing_is_copied() -> None:
    manager = make_manager(num_pages=2)
    sequence = hold(manager, TEXT[:8], committed=8)
    before = sequence.page_table[:]
    manager.truncate(sequence, 6)
    manager.extend(sequence, [1, 2])
    assert (sequence.page_table, manager.pending_copies()) == (before, [])
    manager.commit(sequence, 8)
    manager.release(sequence)
    assert hold(manager, [*TEXT[:6], 1, 2]).num_cached_tokens == 4
    manager.check_integrity()


def test_twenty_sequences_over_one_prompt_take_hardly_more_pages_than_one() -> None:
    manager, prompt = make_manager(num_pages=1024, page_size=16), list(range(8_000))
    long = manager.open(9_000)
    manager.extend(long, prompt)
    manager.commit(long, len(prompt))
    manager.extend(long, [1] * 16)
    pages_of_one = manager.pool.num_used
    for number in range(19):
        sequence = manager.open(9_000)
        manager.extend(sequence, prompt[manager.adopt_prefix(sequence, prompt) :])
        manager.extend(sequence, [number] * 16)
    assert manager.pool.num_used <= 1.1 * pages_of_one
    manager.check_integrity()


def test_a_fork_shares_all_pages_until_one_of_both_writes() -> None:
    manager = make_manager()
    parent = manager.open(12)
    manager.extend(parent, list(range(10)))
    child = manager.fork(parent, 16)
    assert (child.page_table, child.token_ids) == (parent.page_table, parent.token_ids)
    assert (manager.pool.num_used, manager.pending_copies()) == (3, [])
    assert manager.pages_needed(child, 1) == 1
    manager.extend(child, [7])
    assert child.page_table[:2] == parent.page_table[:2]
    assert manager.pending_copies() == [(parent.page_table[2], child.page_table[2])]
    assert manager.pages_needed(parent, 1) == 0  # it is its last page's only holder now
    manager.check_integrity()
    with pytest.raises(InvalidRequestError, match="9 is less than the 10 tokens"):
        manager.fork(parent, 9)


def test_one_holders_copy_of_a_cached_page_takes_no_more_free_pages() -> None:
    manager = make_manager(num_pages=4)
    sequence = hold(manager, TEXT[:8], committed=8)
    manager.truncate(sequence, 7)  # within a page that can be found, and that no other sequence holds
    cached = sequence.page_table[1]
    assert (manager.pages_needed(sequence, 9), manager.pool.num_free) == (2, 2)
    manager.reserve([sequence], [7], [9])
    assert (len(set(sequence.page_table)), manager.pool.num_free) == (4, 0)
    assert manager.pending_copies() in ([], [(cached, sequence.page_table[1])])
    manager.replace_tails([sequence], [7], [TEXT[7:16]])
    manager.check_integrity()


def test_the_copy_to_a_released_fork_is_forgotten() -> None:
    manager = make_manager()
    parent = manager.open(8)
    manager.extend(parent, [1, 2])
    child = manager.fork(parent, 8)
    manager.extend(child, [3])
    manager.release(child)
    assert manager.pending_copies() == []


def test_a_fork_of_a_fork_copies_from_where_the_content_will_come() -> None:
    manager = make_manager()
    first = manager.open(8)
    manager.extend(first, [1, 2])
    second = manager.fork(first, 8)
    manager.extend(second, [3])
    third = manager.fork(second, 8)
    manager.extend(third, [4])
    source = first.page_table[0]
    assert set(manager.pending_copies()) == {(source, second.page_table[0]), (source, third.page_table[0])}


def test_prefix_hash_is_that_of_the_kept_tokens() -> None:
    manager = make_manager()
    sequence = manager.open(20)
    manager.extend(sequence, [5, 6, 7, 8])
    assert manager.prefix_hash(sequence, 0) == EMPTY_PREFIX
    assert manager.prefix_hash(sequence, 4) == prefix_hash([5, 6, 7, 8])
    manager.truncate(sequence, 2)
    manager.extend(sequence, [1, 1, 1])
    assert manager.prefix_hash(sequence, 5) == prefix_hash([5, 6, 1, 1, 1])
    with pytest.raises(ValueError, match="prefix of 6 tokens of a sequence of 5"):
        manager.prefix_hash(sequence, 6)


def test_tokens_that_were_not_known_are_named_afterwards_and_stay_in_place() -> None:
    manager = make_manager()
    sequence = manager.open(12)
    slots = manager.extend(sequence, [5, 6, 0, 0, 0])
    assert manager.prefix_hash(sequence, 5) == prefix_hash([5, 6, 0, 0, 0])
    manager.amend(sequence, 2, [7, 8, 9])
    assert sequence.page_table[1] == slots[4] // 4
    manager.amend(sequence, 2, [7, 8])
    assert (sequence.token_ids, len(sequence.page_table)) == ([5, 6, 7, 8], 1)
    assert manager.prefix_hash(sequence, 4) == prefix_hash([5, 6, 7, 8])
    for length, token_ids in ((3, [1, 2]), (5, []), (-1, [1])):
        with pytest.raises(InvalidRequestError):
            manager.amend(sequence, length, token_ids)
    manager.check_integrity()


def test_check_integrity_sees_a_spoilt_sequence() -> None:
    manager = make_manager()
    sequence = manager.open(8)
    manager.extend(sequence, [1, 2, 3])
    sequence.token_ids += [4, 5]
    with pytest.raises(IntegrityError, match="1 pages are held for 5 tokens"):
        manager.check_integrity()
    sequence.page_table.pop()
    with pytest.raises(IntegrityError, match="page 0 counts 1 holders"):
        manager.check_integrity()


def test_slots_of_a_long_row_are_those_of_its_pages() -> None:
    manager = make_manager(num_pages=400)
    other, sequence = manager.open(9), manager.open(1200)
    manager.extend(sequence, [1, 2, 3])
    manager.extend(other, [1] * 9)  # the next pages of the sequence are not neighbours of its first
    slots = manager.extend(sequence, [place % 7 for place in range(1000)])
    assert list(slots) == [sequence.page_table[place // 4] * 4 + place % 4 for place in range(3, 1003)]
    assert len(set(slots)) == 1000
    manager.check_integrity()


def test_what_is_hashed_ahead_is_found_only_when_it_is_committed_and_not_after_it_is_cut() -> None:
    manager = make_manager()
    sequence = hold(manager, TEXT)
    manager.hash_ahead(sequence)
    assert (len(sequence.page_keys), sequence.num_registered_pages) == (4, 0)
    assert hold(manager, TEXT).num_cached_tokens == 0
    manager.truncate(sequence, 10)
    manager.extend(sequence, [1, 2, 3, 4, 5, 6])
    manager.hash_ahead(sequence)
    manager.commit(sequence, 16)
    manager.check_integrity()  # keys and hashes are those of the text
    assert hold(manager, [*TEXT[:10], 1, 2, 3, 4, 5, 6, 7]).num_cached_tokens == 16


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_one_token_is_appended_as_several_are(prefix_caching: bool) -> None:
    """Twins of which one appends single tokens: the same slots, pages and copies, or the same error."""
    num_copies = num_refused = 0
    for seed in range(40):
        chance = random.Random(seed)
        whole, single = (make_manager(12, prefix_caching=prefix_caching) for _ in range(2))
        pairs: list[tuple[KVSequence, KVSequence]] = []
        for _ in range(80):
            if len(pairs) < 4 or chance.random() < 0.1:
                text = TEXT[: chance.randrange(1, 10)]
                if whole.pool.num_free >= 4:
                    held = [hold(manager, text, committed=len(text)) for manager in (whole, single)]
                    pairs.append((held[0], held[1]))
                continue
            own, twin = chance.choice(pairs)
            token_id = chance.randrange(100)
            if chance.random() < 0.1:
                pairs.remove((own, twin))
                whole.release(own)
                single.release(twin)
            elif chance.random() < 0.2 and own.length > 1:
                length = chance.randrange(1, own.length)  # perhaps into a page that is shared or can be found
                whole.truncate(own, length)
                single.truncate(twin, length)
            elif single.has_room_for_one(twin):
                try:
                    slots = whole.extend(own, [token_id])
                except OutOfPagesError:
                    num_refused += 1
                    with pytest.raises(OutOfPagesError):
                        single.append_checked(twin, token_id)
                else:
                    assert [single.append_checked(twin, token_id)] == list(slots)
                num_copies += len(whole.pending_copies())
                assert whole.pending_copies() == single.pending_copies()
            assert (own.token_ids, own.page_table) == (twin.token_ids, twin.page_table)
            assert whole.pool.num_free == single.pool.num_free
            whole.confirm_copies()
            single.confirm_copies()
        single.check_integrity()
    assert num_refused > 10 and bool(num_copies) == prefix_caching


def test_room_for_one_is_what_may_be_required() -> None:
    manager, other = make_manager(), make_manager()
    sequence = hold(manager, TEXT)
    assert manager.has_room_for_one(sequence) and not other.has_room_for_one(sequence)
    full = manager.open(2)
    manager.extend(full, [1, 2])
    assert not manager.has_room_for_one(full)
    manager.release(sequence)
    assert not manager.has_room_for_one(sequence)


def test_a_sequence_whose_last_page_was_given_back_has_no_integrity() -> None:
    manager = make_manager()
    sequence = hold(manager, TEXT[:8], committed=8)
    sequence.holes = range(len(sequence.page_table) - 1)
    check_sequence(sequence, manager.pool, None)
    sequence.holes = range(len(sequence.page_table))
    with pytest.raises(IntegrityError, match="the last one included"):
        check_sequence(sequence, manager.pool, None)
