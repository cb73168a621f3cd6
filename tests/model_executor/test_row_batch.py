"""Rows as arrays against the same rows one by one: what kernels read, what sequences hold, and logits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.errors import OutOfPagesError
from outrider.kv_cache import KVCacheManager, KVSequence, PagePool
from outrider.model_executor.device_inputs import BatchShape, pack
from outrider.model_executor.input_batch import ForwardBatch, ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch, plan_rows
from tests.support.tiny_models import cached_tiny_model

PAGE_SIZE, VOCAB_SIZE = 4, 200


def as_batch(
    choose: random.Random, sequences: list[KVSequence], *, most_counts: int = 2, most_drafts: int = 5
) -> RowBatch:
    """Rows of which each keeps some tokens, and others follow."""
    counts = [choose.randint(1, most_counts) for _ in sequences]
    drafts = [choose.randint(1, most_drafts) for _ in sequences]
    return RowBatch(
        sequences,
        np.array([choose.randint(max(1, sequence.length - 4), sequence.length) for sequence in sequences]),
        np.array([choose.randrange(VOCAB_SIZE) for _ in range(sum(counts))], dtype=np.int32),
        np.array(counts),
        np.array([choose.randrange(VOCAB_SIZE) for _ in range(sum(drafts))], dtype=np.uint32),
        np.array(drafts),
    )


def batch_of(table: KVCacheManager, columns: RowBatch) -> ForwardBatch:
    """Batch of the rows, made from what their sequences hold afterwards."""
    starts, tails = columns.lengths.tolist(), columns.tails()
    spans = [(start, start + len(tail)) for start, tail in zip(starts, tails, strict=True)]
    places = [(row, place) for row, span in zip(columns.sequences, spans, strict=True) for place in range(*span)]
    ends = list(itertools.accumulate((stop - start for start, stop in spans), initial=0))
    wanted = [range(end - drafts - 1, end) for end, drafts in zip(ends[1:], columns.num_drafts.tolist(), strict=True)]
    return ForwardBatch(
        token_ids=[row.token_ids[place] for row, place in places],
        positions=[place for _, place in places],
        slots=[row.page_table[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for row, place in places],
        page_tables=[table.pages_of(row) for row in columns.sequences],
        query_starts=ends,
        context_lengths=[stop for _, stop in spans],
        logit_indices=[index for indices in wanted for index in indices],
        page_copies=(),
    )


@pytest.mark.parametrize("seed", range(3))
def test_columns_are_laid_out_as_their_rows(seed: int) -> None:
    choose = random.Random(seed)
    table = KVCacheManager(PagePool(400, PAGE_SIZE))
    sequences = [table.open(200) for _ in range(7)]
    for sequence in sequences:
        table.extend(sequence, [choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(1, 30))])
    for _ in range(12):
        columns = as_batch(choose, choose.sample(sequences, choose.randint(1, 7)))
        heads = zip(columns.sequences, columns.lengths.tolist(), strict=True)
        texts = [sequence.token_ids[:length] for sequence, length in heads]
        batch = plan_rows(table, columns)
        own = batch.pattern.shape
        larger = BatchShape(own.num_rows + 3, own.num_tokens + 5, own.max_queries + 1)
        packed = [(shape, batch.pack(shape)) for shape in (own, larger)]
        table.replace_tails(columns.sequences, columns.lengths.tolist(), columns.tails())
        truth = batch_of(table, columns)
        assert own == BatchShape.of(truth)
        assert batch.num_logits == len(truth.logit_indices)
        for shape, numbers in packed:
            num_rows, expected = shape.num_rows, pack(truth, shape)
            before_pages = shape.num_fixed - num_rows - 1
            assert numbers[:before_pages].tolist() == expected[:before_pages].tolist()
            starts, pages = numbers[before_pages : shape.num_fixed].tolist(), numbers[shape.num_fixed :].tolist()
            assert starts[len(columns.sequences) :] == [len(pages)] * (num_rows + 1 - len(columns.sequences))
            for start, own_pages in zip(starts, truth.page_tables, strict=False):  # and those of tokens that were cut
                assert pages[start : start + len(own_pages)] == own_pages.tolist()
        assert [sequence.token_ids for sequence in columns.sequences] == [
            text + tail for text, tail in zip(texts, columns.tails(), strict=True)
        ]
        table.check_integrity()


def test_too_few_pages_change_nothing() -> None:
    table = KVCacheManager(PagePool(3, PAGE_SIZE))
    sequences = [table.open(40) for _ in range(2)]
    for sequence in sequences:
        table.extend(sequence, [1, 2, 3])
    one = np.array([1, 1])
    columns = RowBatch(sequences, np.array([3, 3]), one, one, np.arange(8), np.array([4, 4]))
    with pytest.raises(OutOfPagesError):
        plan_rows(table, columns)
    assert [sequence.token_ids for sequence in sequences] == [[1, 2, 3]] * 2
    table.check_integrity()


def runner_of() -> ModelRunner:
    folder = cached_tiny_model("llama", seed=1)
    return ModelRunner.load(folder, dtype="float32", page_size=PAGE_SIZE, num_pages=200, max_model_len=128)


def twins(choose: random.Random) -> tuple[list[ModelRunner], list[list[KVSequence]]]:
    """Two runners of one model, and of each sequences that hold the same texts."""
    runners = [runner_of(), runner_of()]
    texts = [[choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(3, 20))] for _ in range(4)]
    pairs = [[runner.sequences.open(120) for _ in texts] for runner in runners]
    for runner, sequences in zip(runners, pairs, strict=True):
        runner.forward([ForwardRow(sequence, text) for sequence, text in zip(sequences, texts, strict=True)])
    return runners, pairs


def test_a_forward_of_columns_is_that_of_its_rows() -> None:
    layers, choose = (0, 2), random.Random(4)
    runners, pairs = twins(choose)
    for _ in range(4):
        columns = as_batch(choose, pairs[0])
        lengths, tails = columns.lengths.tolist(), columns.tails()
        logits, states = runners[0].forward_batch(columns, layers)
        for sequence, length in zip(pairs[1], lengths, strict=True):
            runners[1].sequences.truncate(sequence, length)
        heads = zip(pairs[1], tails, (columns.num_drafts + 1).tolist(), strict=True)
        expected = runners[1].forward_batch(RowBatch.of([ForwardRow(*head) for head in heads]), layers)
        torch.testing.assert_close((logits, states), expected, rtol=0, atol=0)
        for ours, other in zip(*pairs, strict=True):
            assert ours.token_ids == other.token_ids
        runners[0].sequences.check_integrity()
    assert runners[0].num_forwards == runners[1].num_forwards


def test_a_forward_that_was_planned_without_its_drafts_is_the_same() -> None:
    layers, choose = (0, 2), random.Random(6)
    runners, pairs = twins(choose)
    for index in range(8):
        columns = as_batch(choose, pairs[0])
        unknown = replace(columns, draft_token_ids=np.zeros(len(columns.draft_token_ids), dtype=np.int64))
        num_free = runners[0].sequences.pool.num_free
        plan = runners[0].plan_batch(unknown, layers)
        assert [sequence.token_ids for sequence in pairs[0]] == [sequence.token_ids for sequence in pairs[1]]
        if index % 3 == 2:
            runners[0].drop_plan(plan)
            assert runners[0].sequences.pool.num_free == num_free
            runners[0].sequences.check_integrity()
            continue
        found = runners[0].forward_batch(columns, layers, plan=plan)
        expected = runners[1].forward_batch(replace(columns, sequences=pairs[1]), layers)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for ours, other in zip(*pairs, strict=True):
            assert ours.token_ids == other.token_ids
        runners[0].sequences.check_integrity()
    assert runners[0].num_forwards == runners[1].num_forwards


def test_a_plan_of_a_shared_page_is_taken_back() -> None:
    table = KVCacheManager(PagePool(9, PAGE_SIZE))
    first = table.open(40)
    table.extend(first, [1, 2, 3, 4, 5])
    second = table.fork(first, 40)
    one = np.array([1])
    plan_rows(table, RowBatch([second], np.array([5]), one, one, np.arange(4), np.array([4])))
    table.release_reserved([second])
    table.check_integrity()
    assert table.pool.num_used == 3 and len(table.pending_copies()) == 1  # its own from now on
    table.release(second)
    assert not table.pending_copies() and table.pool.num_used == 2
    table.check_integrity()


def test_a_forward_that_fails_leaves_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of()
    sequences = [runner.sequences.open(60) for _ in range(2)]
    runner.forward([ForwardRow(sequence, range(9)) for sequence in sequences])
    columns = RowBatch(
        sequences, np.array([9, 7]), np.arange(2), np.ones(2, dtype=np.int64), np.arange(8), np.full(2, 4)
    )
    monkeypatch.setattr(runner.worker, "forward", lambda command, drawn: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.forward_batch(columns)
    assert [sequence.token_ids for sequence in sequences] == [list(range(9)), list(range(7))]
    assert runner.sequences.pool.num_used == 3 + 2
    runner.sequences.check_integrity()
    monkeypatch.undo()
    assert len(runner.forward_batch(columns)[0]) == 10


def test_a_cpu_is_told_all_tokens() -> None:
    runner = ModelRunner.load(cached_tiny_model(), device="cpu", dtype="float32", page_size=4, num_pages=20)
    sequence = runner.sequences.open(9)
    runner.forward([ForwardRow(sequence, [3, 4, 5], 1)])
    with pytest.raises(ValueError, match="not known here"):
        runner.forward_batch(RowBatch.drawn([sequence]), drawn=torch.tensor([6], dtype=torch.int32))
    assert sequence.token_ids == [3, 4, 5]
