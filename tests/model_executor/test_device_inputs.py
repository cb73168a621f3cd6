"""The layout in which a batch goes to a GPU, and the choice of a captured shape; none of it needs one."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from outrider.kernels.paged_attention import DevicePlan, RowSpan
from outrider.kv_cache import KVCacheManager, PagePool
from outrider.model_executor.device_inputs import BatchFrame, BatchShape, pack, spans_in, unpack
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow, plan_forward
from outrider.model_executor.input_buffer import PinnedInputBuffer
from outrider.model_executor.layers.contract import DeviceBatch

WINDOWS = (None, 5)


def make_rows() -> tuple[KVCacheManager, list[ForwardRow]]:
    """Rows of three and of one token, whose contexts take two pages and three."""
    table = KVCacheManager(PagePool(8, 4))
    first, second = table.open(12), table.open(16)
    table.extend(first, [1, 2, 3, 4])
    table.extend(second, [1] * 8)
    return table, [ForwardRow(first, [5, 6, 7], 2), ForwardRow(second, [8], 1)]


def make_batch() -> ForwardBatch:
    """The rows, laid out."""
    return plan_forward(*make_rows())


def laid_out(batch: ForwardBatch, shape: BatchShape) -> DeviceBatch:
    frame = BatchFrame(4, WINDOWS, torch.zeros(1, dtype=torch.int32))
    return unpack(torch.from_numpy(pack(batch, shape)), shape, frame, len(batch.logit_indices))


def test_spans_of_rows_are_read_on_the_host() -> None:
    batch = make_batch()
    shape = BatchShape.of(batch)
    assert spans_in(pack(batch, shape), shape) == (RowSpan(0, 3, 7, 0), RowSpan(3, 1, 9, 2))


@pytest.mark.parametrize(("more_rows", "more_tokens"), [(0, 0), (2, 0), (0, 3), (1, 5), (6, 4)])
def test_a_batch_comes_out_as_it_went_in(more_rows: int, more_tokens: int) -> None:
    batch = make_batch()
    own = BatchShape.of(batch)
    assert own == BatchShape(2, 4, 3)
    shape = dataclasses.replace(own, num_rows=own.num_rows + more_rows, num_tokens=own.num_tokens + more_tokens)
    found = laid_out(batch, shape)
    columns = {"token_ids": found.token_ids, "positions": found.positions, "slots": found.groups[1].slots}
    for name, column in columns.items():
        np.testing.assert_array_equal(column[:4], getattr(batch, name))
        assert column.shape == (shape.num_tokens,)
    np.testing.assert_array_equal(found.logit_indices, batch.logit_indices)
    assert len(found.groups) == len(WINDOWS)
    plan = found.groups[1].plan
    assert isinstance(plan, DevicePlan)
    assert (plan.window, plan.page_size, plan.rows.max_queries) == (5, 4, 3)
    np.testing.assert_array_equal(plan.rows.context_lengths[:2], batch.context_lengths)
    np.testing.assert_array_equal(plan.rows.query_starts[:3], batch.query_starts)
    for row in range(2):
        pages = plan.rows.pages[plan.rows.page_starts[row] : plan.rows.page_starts[row + 1]]
        np.testing.assert_array_equal(pages, batch.page_tables[row])
        assert len(pages) == math.ceil(batch.context_lengths[row] / 4)


def test_what_fills_up_a_shape_has_no_slot_and_no_queries() -> None:
    found = laid_out(make_batch(), BatchShape(4, 9, 8))
    assert (found.groups[0].slots[4:] == -1).all()
    assert (found.token_ids[4:] == 0).all()
    rows = found.groups[0].plan.rows
    assert not isinstance(rows, tuple)
    assert (rows.query_starts[2:] == 4).all()
    assert (rows.context_lengths[2:] == 0).all()
    assert (rows.page_starts[2:] == len(rows.pages)).all()


def test_what_was_put_is_taken_in_once() -> None:
    input_buffer = PinnedInputBuffer(6, torch.device("cpu"))
    numbers = np.array([3, 1, 4, 1], dtype=np.int32)
    input_buffer.put(numbers)
    numbers[:] = 9  # the caller's again
    assert input_buffer.numbers.tolist() == [0] * 6
    input_buffer.copy_inputs()
    assert input_buffer.numbers.tolist() == [3, 1, 4, 1, 0, 0]
    input_buffer.numbers.fill_(7)
    input_buffer.copy_inputs()
    assert input_buffer.numbers.tolist() == [7] * 6


def test_numbers_of_a_launch_that_failed_before_it_began_are_forgotten() -> None:
    input_buffer = PinnedInputBuffer(4, torch.device("cpu"))
    input_buffer.put(np.array([1, 2, 3], dtype=np.int32))
    input_buffer.put(np.array([5], dtype=np.int32))
    input_buffer.copy_inputs()
    assert input_buffer.numbers.tolist() == [5, 0, 0, 0]
