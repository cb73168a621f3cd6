"""The layout of a ragged batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.errors import InvalidRequestError
from outrider.kv_cache import KVCacheManager, KVSequence, PagePool
from outrider.model_executor.input_batch import ForwardRow, plan_forward


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
