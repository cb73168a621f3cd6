"""The layout of a ragged batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.errors import InvalidRequestError
from outrider.kv_cache import KVCacheManager, KVSequence, PagePool
from outrider.model_executor.device_inputs import BatchShape, pack
from outrider.model_executor.input_batch import ForwardRow, TokenLimits, check_rows, plan_forward
from outrider.packed_ids import pack_long


def test_a_ragged_batch_is_laid_out_row_after_row() -> None:
    table = KVCacheManager(PagePool(8, 4))
    first, second = table.open(12), table.open(12)
    table.extend(first, [1, 2, 3, 4, 5])
    batch = plan_forward(table, [ForwardRow(second, [7, 8, 9], 1), ForwardRow(first, [6, 7], 2)])
    assert batch.num_rows == 2
    assert batch.token_ids == [7, 8, 9, 6, 7]
    assert batch.positions == [0, 1, 2, 5, 6]
    assert batch.slots == [12, 13, 14, 5, 6]
    assert list(map(list, batch.page_tables)) == [[3], [0, 1]]
    assert batch.query_starts == [0, 3, 5]
    assert batch.context_lengths == [3, 7]
    assert batch.logit_indices == [2, 3, 4]
    assert batch.page_copies == ()
    assert (first.length, second.length) == (7, 3)


def test_copies_before_a_write_go_with_the_forward_that_writes() -> None:
    table = KVCacheManager(PagePool(8, 4))
    parent = table.open(12)
    table.extend(parent, list(range(10)))
    child = table.fork(parent, 12)
    full, partial = parent.page_table[1:]
    table.truncate(parent, 6)
    batch = plan_forward(table, [ForwardRow(parent, [1], 1), ForwardRow(child, [1], 1)])
    assert parent.page_table[1] != full == child.page_table[1]
    assert child.page_table[2] == partial  # it is the only holder by then
    assert batch.page_copies == ((full, parent.page_table[1]),)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda a, b: [ForwardRow(a, [1]), ForwardRow(b, [])], "token_ids"),
        (lambda a, b: [ForwardRow(a, [1]), ForwardRow(b, [1, 2], 3)], "num_logits"),
        (lambda a, b: [ForwardRow(a, [1]), ForwardRow(b, [1, 2], -1)], "num_logits"),
        (lambda a, b: [ForwardRow(a, [1]), ForwardRow(b, [1] * 9)], "token_ids"),
        (lambda a, b: [ForwardRow(a, [1]), ForwardRow(a, [1])], "sequence"),
    ],
)
def test_a_bad_row_changes_nothing(spoil: Callable[[KVSequence, KVSequence], list[ForwardRow]], field: str) -> None:
    table = KVCacheManager(PagePool(8, 4))
    first, second = table.open(8), table.open(8)
    with pytest.raises(InvalidRequestError) as raised:
        plan_forward(table, spoil(first, second))
    assert raised.value.field == field
    assert (first.length, second.length) == (0, 0)


def test_a_batch_with_a_long_row_is_laid_out_as_any_other() -> None:
    ids = [place * 31 % 1000 for place in range(700)]
    table = KVCacheManager(PagePool(400, 4))
    sequence, neighbour = table.open(1000), table.open(1000)
    table.extend(neighbour, [5, 6, 7])
    for start, stop in ((0, 3), (3, 603), (603, 700)):
        batch = plan_forward(table, [ForwardRow(neighbour, [8]), ForwardRow(sequence, pack_long(ids[start:stop]), 0)])
        assert list(batch.token_ids) == [8, *ids[start:stop]]
        assert list(batch.positions[1:]) == list(range(start, stop))
        pages = batch.page_tables[1]
        assert list(batch.slots[1:]) == [pages[place // 4] * 4 + place % 4 for place in range(start, stop)]
        own = BatchShape.of(batch)
        numbers = pack(batch, BatchShape(own.num_rows + 1, own.num_tokens + 3, own.max_queries))
        assert numbers[: own.num_tokens + 3].tolist() == [8, *ids[start:stop], 0, 0, 0]


def test_an_id_of_a_long_row_out_of_range_is_named() -> None:
    table = KVCacheManager(PagePool(400, 4))
    sequence = table.open(1000)
    row = ForwardRow(sequence, pack_long([1] * 500 + [999]))
    with pytest.raises(InvalidRequestError, match="999 is not from 0 to 998"):
        check_rows(table, [row], TokenLimits(1000, 999))
    check_rows(table, [row], TokenLimits(1000, 1000))
