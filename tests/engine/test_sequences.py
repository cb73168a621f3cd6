"""The sequence table: what stands in the slots is what the sequences say they hold, whatever was done to them."""

from __future__ import annotations

import random

import pytest

from outrider.engine.pages import PagePool
from outrider.engine.sequences import Sequence, SequenceTable
from outrider.errors import IntegrityError, InvalidRequestError, OutOfPagesError
from outrider.types import extend_prefix_hash


def make_table(num_pages: int = 8, page_size: int = 4) -> SequenceTable:
    return SequenceTable(PagePool(num_pages, page_size))


def test_opening_reserves_everything_and_growing_takes_no_more() -> None:
    table = make_table()
    sequence = table.open(30)
    assert (sequence.reserved_pages, table.pool.num_free, sequence.length) == (8, 0, 0)
    with pytest.raises(OutOfPagesError):
        table.open(1)
    slots = table.extend(sequence, list(range(30)))
    assert slots == [sequence.page_table[p // 4] * 4 + p % 4 for p in range(30)]
    assert sequence.token_ids == list(range(30))
    table.release(sequence)
    assert (table.pool.num_free, len(table)) == (8, 0)


def test_growing_past_the_reservation_is_refused_and_changes_nothing() -> None:
    table = make_table()
    sequence = table.open(5)
    table.extend(sequence, [1, 2, 3])
    with pytest.raises(InvalidRequestError, match="3 more tokens after 3 pass the 5 that were reserved"):
        table.extend(sequence, [4, 5, 6])
    assert sequence.token_ids == [1, 2, 3]


def test_truncating_keeps_the_reservation_and_the_prefix() -> None:
    table = make_table()
    sequence = table.open(9)
    slots = table.extend(sequence, [1, 2, 3, 4, 5, 6])
    table.truncate(sequence, 2)
    assert (sequence.token_ids, sequence.reserved_pages) == ([1, 2], 3)
    assert table.extend(sequence, [9]) == slots[2:3]
    for length in (-1, 4):
        with pytest.raises(InvalidRequestError, match="cannot keep"):
            table.truncate(sequence, length)


def test_a_released_sequence_cannot_be_used() -> None:
    table = make_table()
    sequence = table.open(4)
    table.release(sequence)
    for use in (
        lambda: table.extend(sequence, [1]),
        lambda: table.truncate(sequence, 0),
        lambda: table.release(sequence),
    ):
        with pytest.raises(InvalidRequestError, match="was released"):
            use()
    with pytest.raises(InvalidRequestError, match="another table"):
        make_table().extend(table.open(4), [1])


def test_a_fork_shares_full_pages_and_copies_the_partial_one() -> None:
    table = make_table()
    parent = table.open(12)
    table.extend(parent, list(range(10)))
    child, copies = table.fork(parent, 16)
    assert child.page_table[:2] == parent.page_table[:2]
    assert set(child.page_table[2:]).isdisjoint(parent.page_table)
    assert copies == [(parent.page_table[2], child.page_table[2])] == table.pending_copies()
    assert child.token_ids == parent.token_ids
    table.check_integrity()


def test_a_fork_at_a_page_border_copies_nothing() -> None:
    table = make_table()
    parent = table.open(8)
    table.extend(parent, list(range(8)))
    _, copies = table.fork(parent, 12)
    assert copies == table.pending_copies() == []


def test_a_fork_without_room_changes_nothing() -> None:
    table = make_table(num_pages=5)
    parent = table.open(12)
    table.extend(parent, list(range(10)))
    with pytest.raises(OutOfPagesError):
        table.fork(parent, 12)
    with pytest.raises(InvalidRequestError, match="9 is less than the 10 tokens"):
        table.fork(parent, 9)
    assert (table.pool.num_free, len(table)) == (2, 1)
    table.check_integrity()


def test_nothing_appended_to_a_full_sequence_is_nothing() -> None:
    table = make_table()
    sequence = table.open(4)
    table.extend(sequence, [1, 2, 3, 4])
    assert table.extend(sequence, []) == []
    assert sequence.length == 4


def test_the_copy_to_a_released_fork_is_forgotten() -> None:
    table = make_table()
    parent = table.open(8)
    table.extend(parent, [1, 2])
    child, _ = table.fork(parent, 8)
    table.release(child)
    assert table.pending_copies() == []


def test_prefix_hash_is_the_running_hash_of_the_kept_tokens() -> None:
    table = make_table()
    sequence = table.open(20)
    table.extend(sequence, [5, 6, 7, 8])
    assert table.prefix_hash(sequence, 0) == 0
    assert table.prefix_hash(sequence, 4) == extend_prefix_hash(0, [5, 6, 7, 8])
    table.truncate(sequence, 2)
    table.extend(sequence, [1, 1, 1])
    assert table.prefix_hash(sequence, 5) == extend_prefix_hash(0, [5, 6, 1, 1, 1])
    assert table.prefix_hash(sequence, 2) == extend_prefix_hash(0, [5, 6])
    with pytest.raises(ValueError, match="prefix of 6 tokens of a sequence of 5"):
        table.prefix_hash(sequence, 6)


def test_what_room_was_made_for_is_named_afterwards() -> None:
    table = SequenceTable(PagePool(8, 4))
    sequence = table.open(12)
    table.extend(sequence, [5, 6, 0, 0, 0])
    assert table.prefix_hash(sequence, 5) == extend_prefix_hash(0, [5, 6, 0, 0, 0])
    table.amend(sequence, 2, [7, 8])
    assert sequence.token_ids == [5, 6, 7, 8]
    assert table.prefix_hash(sequence, 4) == extend_prefix_hash(0, [5, 6, 7, 8])
    for length, token_ids in ((3, [1, 2]), (5, []), (-1, [1])):
        with pytest.raises(InvalidRequestError):
            table.amend(sequence, length, token_ids)
    assert sequence.token_ids == [5, 6, 7, 8]
    table.check_integrity()


def test_check_integrity_sees_a_spoilt_sequence() -> None:
    table = make_table()
    sequence = table.open(8)
    table.extend(sequence, [1, 2, 3])
    sequence.page_table.pop()
    with pytest.raises(IntegrityError, match="page 1 counts 1 holders"):
        table.check_integrity()


class Memory:
    """What a cache would hold: a token in each slot, by the copies and slots that the table plans."""

    def __init__(self, table: SequenceTable) -> None:
        self.table = table
        self.slots: dict[int, int] = {}

    def forward(self, grown: list[tuple[Sequence, list[int]]]) -> None:
        writes = [
            (slot, token)
            for sequence, tokens in grown
            for slot, token in zip(self.table.extend(sequence, tokens), tokens, strict=True)
        ]
        size = self.table.pool.page_size
        copies = [(s * size + i, d * size + i) for s, d in self.table.pending_copies() for i in range(size)]
        self.slots |= {destination: self.slots.get(source, -1) for source, destination in copies}
        self.table.confirm_copies()
        assert len({slot for slot, _ in writes}) == len(writes)
        self.slots |= dict(writes)

    def read(self, sequence: Sequence) -> list[int]:
        size = self.table.pool.page_size
        return [self.slots[sequence.page_table[p // size] * size + p % size] for p in range(sequence.length)]


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_actions_keeps_every_text_and_every_page(seed: int, page_size: int) -> None:
    rng = random.Random(f"{seed}/{page_size}")
    table = make_table(num_pages=1 + 96 // page_size, page_size=page_size)
    memory = Memory(table)
    alive: list[tuple[Sequence, list[int]]] = []  # with the text that each ought to hold
    refusals = 0
    for _ in range(250):
        action = rng.choice(["open", "forward", "forward", "forward", "truncate", "fork", "release"])
        try:
            if action == "open":
                alive.append((table.open(rng.randint(1, 40)), []))
            elif alive and action == "forward":
                grown = [
                    (sequence, [rng.randrange(1000) for _ in range(rng.randint(1, sequence.max_length - len(text)))])
                    for sequence, text in rng.sample(alive, rng.randint(1, len(alive)))
                    if len(text) < sequence.max_length
                ]
                memory.forward(grown)
                texts = {id(sequence): text for sequence, text in alive}
                for sequence, tokens in grown:
                    texts[id(sequence)].extend(tokens)
            elif alive and action == "truncate":
                sequence, text = rng.choice(alive)
                del text[rng.randint(0, len(text)) :]
                table.truncate(sequence, len(text))
            elif alive and action == "fork":
                sequence, text = rng.choice(alive)
                alive.append((table.fork(sequence, rng.randint(max(1, len(text)), 40))[0], list(text)))
            elif alive and action == "release":
                table.release(alive.pop(rng.randrange(len(alive)))[0])
        except OutOfPagesError:
            refusals += 1
        table.check_integrity()
        for sequence, text in alive:
            assert sequence.token_ids == text
    memory.forward([])
    assert refusals
    for sequence, text in alive:
        assert memory.read(sequence) == text
        table.release(sequence)
    assert table.pool.num_free == table.pool.num_pages
    table.check_integrity()
