"""The layout in which a batch goes to a GPU, and the choice of a captured shape; none of it needs one."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from outrider.engine.batch import ForwardBatch, ForwardRow, plan_forward
from outrider.engine.device_inputs import BatchFrame, BatchShape, pack, unpack
from outrider.engine.graphs import captured_shapes, choose_shape
from outrider.engine.kernels.paged_attention import DevicePlan
from outrider.engine.kernels.paged_attention.device_plan import MAX_SPLITS, choose_splits, num_counters
from outrider.engine.models.decoder import DeviceBatch
from outrider.kv_cache import KVCacheManager, PagePool

WINDOWS = frozenset((None, 5))


def make_batch() -> ForwardBatch:
    """Rows of three and of one token, whose contexts take two pages and three."""
    table = KVCacheManager(PagePool(8, 4))
    first, second = table.open(12), table.open(16)
    table.extend(first, [1, 2, 3, 4])
    table.extend(second, [1] * 8)
    return plan_forward(table, [ForwardRow(first, [5, 6, 7], 2), ForwardRow(second, [8], 1)])


def laid_out(batch: ForwardBatch, shape: BatchShape) -> DeviceBatch:
    frame = BatchFrame(4, WINDOWS, torch.zeros(1, dtype=torch.int32))
    return unpack(torch.from_numpy(pack(batch, shape)), shape, frame, len(batch.logit_indices))


@pytest.mark.parametrize(("more_rows", "more_tokens"), [(0, 0), (2, 0), (0, 3), (1, 5)])
def test_a_batch_comes_out_as_it_went_in(more_rows: int, more_tokens: int) -> None:
    batch = make_batch()
    own = BatchShape.of(batch)
    assert own == BatchShape(2, 4, 3)
    shape = dataclasses.replace(own, num_rows=own.num_rows + more_rows, num_tokens=own.num_tokens + more_tokens)
    found = laid_out(batch, shape)
    for name in ("token_ids", "positions", "slots"):
        np.testing.assert_array_equal(getattr(found, name)[:4], getattr(batch, name))
        assert getattr(found, name).shape == (shape.num_tokens,)
    np.testing.assert_array_equal(found.logit_indices, batch.logit_indices)
    assert set(found.plans) == WINDOWS
    plan = found.plans[5]
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
    assert (found.slots[4:] == -1).all()
    assert (found.token_ids[4:] == 0).all()
    rows = next(iter(found.plans.values())).rows
    assert not isinstance(rows, tuple)
    assert (rows.query_starts[2:] == 4).all()
    assert (rows.context_lengths[2:] == 0).all()
    assert (rows.page_starts[2:] == len(rows.pages)).all()


def test_the_smallest_captured_shape_that_fits_is_taken() -> None:
    shapes = captured_shapes()
    assert choose_shape(BatchShape(1, 1, 1), shapes) == BatchShape(1, 1, 1)
    assert choose_shape(BatchShape(1, 4, 4), shapes) == BatchShape(1, 5, 8)
    assert choose_shape(BatchShape(3, 3, 1), shapes) == BatchShape(4, 4, 1)
    # A row of two queries does not fit a shape of single ones, however many tokens that has.
    assert choose_shape(BatchShape(3, 4, 2), shapes) == BatchShape(4, 8, 8)
    assert choose_shape(BatchShape(32, 160, 5), shapes) == BatchShape(32, 160, 8)
    assert choose_shape(BatchShape(1, 9, 9), shapes) == BatchShape(2, 133, 128)
    assert choose_shape(BatchShape(1, 140, 140), shapes) == BatchShape(1, 256, 256)
    assert choose_shape(BatchShape(9, 8 * 5 + 128, 128), shapes) == BatchShape(9, 168, 128)
    assert choose_shape(BatchShape(2, 5 + 129, 129), shapes) == BatchShape(2, 5 + 256, 256)
    assert choose_shape(BatchShape(2, 5 + 257, 257), shapes) is None
    assert choose_shape(BatchShape(66, 66, 1), shapes) is None
    assert choose_shape(BatchShape(1, 1, 1), ()) is None


@pytest.mark.parametrize("num_groups", [1, 3, 8, 64, 131, 132, 133, 264, 5000])
def test_contexts_are_cut_only_while_that_fills_the_device(num_groups: int) -> None:
    splits = choose_splits(num_groups, 132)
    assert 1 <= splits <= MAX_SPLITS
    if splits > 1:
        assert num_groups * splits <= num_counters(132)
