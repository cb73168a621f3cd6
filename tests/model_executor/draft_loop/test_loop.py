"""A draft loop against drawing token by token, on a model whose logits depend on every key it reads."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import InvalidRequestError, NonFiniteLogitsError
from outrider.kernels.draft_sampling.layout import DrawColumn, Method
from outrider.kernels.paged_attention import DevicePlan
from outrider.kv_cache import KVCacheLayout, KVCacheManager, KVCacheSpec, KVSequence, PagePool
from outrider.model_executor.device_inputs import BatchFrame
from outrider.model_executor.draft_loop import MAX_STEPS, DraftingRules, DraftMetadata, DraftRow
from outrider.model_executor.draft_loop.batched import (
    DraftBatch,
    MetadataBatch,
    plan_draft_batch,
    restore_sequences,
)
from outrider.model_executor.draft_loop.in_flight import BatchInFlight
from outrider.model_executor.draft_loop.loop import DraftLoop
from outrider.model_executor.draft_loop.plan import LoopShape, loop_of, pack_draft
from outrider.model_executor.draft_loop.results import DrawnBatch, Draws
from outrider.model_executor.graph_capture import CaptureBound, CaptureLimits, NoGraphs
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch
from outrider.ports import Open
from outrider.randomness.streams import Stream
from outrider.sampling import Drawn, LogitRow, propose
from outrider.sampling.draws import gumbel_argmax_by_groups
from outrider.sampling.session import SessionSampling
from outrider.types import AcceptanceMethod, SamplingParams, SparseEvidence
from tests.support.core_driver import open_session

VOCAB_SIZE = 97
PAGE_SIZE = 4
NUM_PAGES = 300
RULES = DraftingRules(support_mass=0.95, support_limit=60)
CUTS: list[dict[str, Any]] = [
    {}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.7, "top_k": 9, "min_p": 0.01}
]  # fmt: skip
POISON = -5
"""A token after which logits are no numbers."""


def logits_of(text: list[int]) -> torch.Tensor:  # [V]
    seed = hash(tuple(text)) % 2**63
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2
    return logits * float("nan") if text[-1] == POISON % VOCAB_SIZE and len(text) > 3 else logits


class TextModel:
    """Keeps the token itself as its key; the hidden state of a query is the text that it sees."""

    def __init__(self, *, may_poison: bool = False) -> None:
        self.device = torch.device("cpu")
        self.texts: list[list[int]] = []
        self.may_poison = may_poison

    def hidden_states(self, batch: DeviceBatch, kv_cache: KVCacheTensors) -> torch.Tensor:
        """Stores what has a slot; [T] places in ``texts``."""
        plan, kv = batch.groups[0].plan, kv_cache.layer(0)[:, :, 0, 0]  # [S, 2]
        assert isinstance(plan, DevicePlan)
        slots = batch.groups[0].slots.tolist()
        for token, position, slot in zip(batch.token_ids.tolist(), batch.positions.tolist(), slots, strict=True):
            if slot >= 0:
                kv[slot] = torch.tensor([token, position])
        rows = plan.rows
        starts, contexts, pages = rows.query_starts.tolist(), rows.context_lengths.tolist(), rows.pages.tolist()
        hidden = torch.full((len(slots),), -1)
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            own = pages[rows.page_starts[row] : rows.page_starts[row + 1]]
            held = [kv[own[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE].tolist() for p in range(contexts[row])]
            for query in range(begin, end):
                seen = held[: contexts[row] - (end - 1 - query)]
                assert [position for _, position in seen] == list(range(len(seen)))
                assert batch.positions[query] == len(seen) - 1
                hidden[query] = len(self.texts)
                self.texts.append([token for token, _ in seen])
        return hidden

    def draft_logits(self, batch: DeviceBatch, kv_cache: KVCacheTensors, indices: torch.Tensor | None) -> torch.Tensor:
        return self.head_logits(self.hidden_states(batch, kv_cache), indices)

    def head_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """[N, V]; of what fills up a shape, numbers that must not be read."""
        chosen = (hidden if indices is None else hidden[indices.long()]).tolist()
        return torch.stack(
            [logits_of(self.texts[i]) if i >= 0 else torch.full((VOCAB_SIZE,), float("nan")) for i in chosen]
        )


class Rig:
    """A loop over a table of sequences whose pages are scattered."""

    def __init__(self) -> None:
        self.table = KVCacheManager(PagePool(NUM_PAGES, PAGE_SIZE))
        for single in [self.table.open(1) for _ in range(NUM_PAGES)][::2]:
            self.table.release(single)
        layout = KVCacheLayout.of([KVCacheSpec(1, 1)])
        self.cache = KVCacheTensors(layout, NUM_PAGES * PAGE_SIZE, dtype=torch.int64, device=torch.device("cpu"))
        self.cache.fill_(-7)
        self.kv = self.cache.layer(0)[:, :, 0, 0]  # [S, 2] the token and its position
        self.model = TextModel()
        frame = BatchFrame(PAGE_SIZE, (None,), torch.zeros(1, dtype=torch.int32))
        self.loop = DraftLoop(self.model, self.cache, frame, RULES, pages_per_row=20)

    def sequence(self, text: list[int]) -> KVSequence:
        sequence = self.table.open(60)
        for token, slot in enumerate(self.table.extend(sequence, text)):
            self.kv[slot] = torch.tensor([text[token], token])
        return sequence

    def draft(self, rows: list[DraftRow], shape: LoopShape | None = None) -> list[Draws]:
        batched = DraftBatch.of(rows)
        plan = plan_draft_batch(self.table, batched)
        shape = shape or loop_of(self.loop.command_for(plan))
        self.loop.run(shape, pack_draft(plan, shape))
        return BatchInFlight(self.loop, shape, batched, self.table).draws()


def opened(seed: int, method: AcceptanceMethod = AcceptanceMethod.REJECTION, **sampling: Any) -> Open:
    return open_session(
        0, prompt_length=5, max_length=60, num_token_ids=VOCAB_SIZE - 2, seed=seed, acceptance_method=method,
        sampling=SamplingParams(**sampling),
    )  # fmt: skip


def one_by_one(row: DraftRow, text: list[int], rules: DraftingRules = RULES) -> list[Drawn]:
    found: list[Drawn] = []
    text = [*text, *row.token_ids]
    for _ in range(row.num_drafts):
        asked = LogitRow(SessionSampling(row.metadata.open), text, len(text), row.base)
        (drawn,) = propose(logits_of(text)[None], [asked], rules)
        found.append(drawn)
        if drawn.error is not None:
            break
        text.append(drawn.token_id)
    return found


def check(found: Draws, expected: list[Drawn]) -> None:
    sound = [one for one in expected if one.error is None]
    assert found.token_ids == tuple(one.token_id for one in sound)
    assert type(found.error) is type(expected[-1].error)
    ids = [one.support_ids for one in sound if one.support_ids is not None]
    probs = [one.support_probs for one in sound if one.support_probs is not None]
    assert isinstance(found.evidence, SparseEvidence) == bool(ids)
    if isinstance(found.evidence, SparseEvidence):
        assert found.evidence.counts.dtype == found.evidence.token_ids.dtype == np.dtype(np.int32)
        assert found.evidence.counts.tolist() == [len(row) for row in ids]
        np.testing.assert_array_equal(found.evidence.token_ids, np.concatenate(ids))
        np.testing.assert_allclose(found.evidence.probs, np.concatenate(probs), rtol=1e-6)


def metadata(open_: Open) -> DraftMetadata:
    return DraftMetadata.of(open_, VOCAB_SIZE)


def random_row(rig: Rig, choose: random.Random) -> tuple[DraftRow, list[int]]:
    text = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(0, 30))]
    method = choose.choice([AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED, AcceptanceMethod.TYPICAL])
    cut = choose.choice(CUTS)
    open_ = opened(choose.getrandbits(64), method, temperature=choose.choice([0.0, 0.7, 1.0]), min_tokens=8, **cut)
    open_ = replace(open_, eos_token_ids=(3, 4), banned_token_ids=(50,))
    tokens = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(1, 2))]
    base = len(text) + len(tokens) - choose.choice([0, 0, 2]) * (len(text) > 2)
    return DraftRow(metadata(open_), rig.sequence(text), tokens, choose.randint(1, MAX_STEPS), base), text


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
def test_a_loop_draws_what_drawing_one_by_one_does(num_rows: int) -> None:
    choose = random.Random(num_rows)
    for _ in range(4):
        rig = Rig()
        pairs = [random_row(rig, choose) for _ in range(num_rows)]
        found = rig.draft([row for row, _ in pairs])
        for (row, text), drawn in zip(pairs, found, strict=True):
            check(drawn, one_by_one(row, text))
            assert row.sequence.token_ids == [*text, *row.token_ids, *drawn.token_ids[: row.num_drafts - 1]]
        rig.table.check_integrity()


def test_a_loop_draws_greedily_with_certain_evidence() -> None:
    rig, choose, greedy = Rig(), random.Random(9), DraftingRules(takes_argmax=True)
    pairs = [random_row(rig, choose) for _ in range(7)]
    pairs = [
        (replace(row, metadata=DraftMetadata.of(row.metadata.open, VOCAB_SIZE, takes_argmax=True)), text)
        for row, text in pairs
    ]
    for (row, text), drawn in zip(pairs, rig.draft([row for row, _ in pairs]), strict=True):
        check(drawn, one_by_one(row, text, greedy))


def as_batch(rows: list[DraftRow]) -> DraftBatch:
    return DraftBatch(
        [row.sequence for row in rows],
        MetadataBatch.of([row.metadata for row in rows]),
        [row.base for row in rows],
        [token_id for row in rows for token_id in row.token_ids],
        [len(row.token_ids) for row in rows],
        [row.num_drafts for row in rows],
        [row.kv_offset for row in rows],
    )


def test_columns_draw_what_their_rows_do() -> None:
    kinds = set[type]()
    for seed in range(8):
        compare_columns_with_rows(seed, kinds)
    assert kinds == {DrawnBatch, list}


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}])
def test_a_loop_that_guesses_first_draws_what_follows_its_guess(cut: dict[str, Any]) -> None:
    """The guess by the noise of a target's bonus token, the others as a proposal after it."""
    rig, base, count = Rig(), 6, 4
    opens = [opened(seed, temperature=0.9, **cut) for seed in range(3)]
    texts = [[seed + 1] * (base + seed) for seed in range(3)]
    rows = [
        DraftRow(metadata(open_), rig.sequence(text[:-1]), text[-1:], count + 1, len(text))
        for open_, text in zip(opens, texts, strict=True)
    ]
    batched = as_batch(rows)
    batched.guessed_from = [base] * 3
    plan = plan_draft_batch(rig.table, batched)
    shape = loop_of(rig.loop.command_for(plan))
    rig.loop.run(shape, pack_draft(plan, shape))
    found = BatchInFlight(rig.loop, shape, batched, rig.table).draws()
    for open_, text, drawn in zip(opens, texts, found, strict=True):
        guess, *rest = drawn.token_ids
        asked = LogitRow(SessionSampling(open_), text, len(text), base)
        weights = logits_of(text)[None] / 0.9
        weights[:, VOCAB_SIZE - 2 :] = float("-inf")
        assert guess == int(gumbel_argmax_by_groups(weights, [asked]))
        follows = DraftRow(metadata(open_), rig.sequence(text), [guess], count, len(text) + 1)
        evidence = drawn.evidence
        assert isinstance(evidence, SparseEvidence) and evidence.counts[0] == 0
        own = SparseEvidence(evidence.counts[1:], evidence.token_ids, evidence.probs)
        check(Draws(tuple(rest), own), one_by_one(follows, text))


def test_a_guess_leaves_the_words_of_later_proposals_as_they_were() -> None:
    rig = Rig()
    rows = [DraftRow(metadata(opened(seed, temperature=0.9)), rig.sequence([7] * 5), [7], 3, 6) for seed in range(2)]
    batched = as_batch(rows)
    before = batched.words().copy()
    batched.guessed_from = [4, 4]
    guesses = batched.words()
    assert set(guesses[:, DrawColumn.METHOD].tolist()) == {Method.GROUPED}
    assert set(guesses[:, DrawColumn.STREAM].tolist()) == {Stream.OUTSIDE}
    batched.guessed_from = None
    assert batched.words().tolist() == before.tolist()


def compare_columns_with_rows(seed: int, kinds: set[type]) -> None:
    """Compare after drafts were rejected, which a loop leaves to be cut when it runs."""
    found, held = [], []
    for has_rejected in (False, True):
        rig, choose = Rig(), random.Random(seed)
        pairs = [random_row(rig, choose) for _ in range(7)]
        pairs = [pair for pair in pairs if pair[0].metadata.needs_evidence == (seed % 2 > 0)] or pairs[:1]
        rows = [replace(row, base=len(text) + len(row.token_ids)) for row, text in pairs]
        batched = as_batch(rows)
        for row, length in zip(rows, [choose.randrange(9) for _ in rows], strict=True):
            rig.table.extend(row.sequence, [50] * length if has_rejected else [])
        command = rig.loop.command_for(plan_draft_batch(rig.table, batched))
        rig.loop.run(loop_of(command), command.numbers)
        flight = BatchInFlight(rig.loop, loop_of(command), batched, rig.table)
        assert [row.sequence.length for row in rows] == [row.base + row.num_drafts - 1 for row in rows]
        drawn = flight.finish() if has_rejected else flight.draws()
        flight.postprocess()
        if has_rejected:
            kinds.add(type(drawn))
        found.append(in_rows(drawn))
        held.append([list(row.sequence.token_ids) for row in rows])
        rig.table.check_integrity()
    assert found[0] == found[1]
    assert held[0] == held[1]


def in_rows(drawn: DrawnBatch | list[Draws]) -> list[tuple[tuple[int, ...], str]]:
    if isinstance(drawn, list):
        return [(draws.token_ids, repr(draws.evidence)) for draws in drawn]
    rows, start, first = [], 0, 0
    for ids in drawn.texts():
        evidence = None
        if drawn.supports is not None:
            counts = drawn.supports.counts[start : start + len(ids)]
            own = slice(first, first + int(counts.sum()))
            evidence = SparseEvidence(counts, drawn.supports.token_ids[own], drawn.supports.probs[own])
            start, first = start + len(ids), own.stop
        rows.append((tuple(ids), repr(evidence)))
    return rows


def test_a_row_of_columns_that_cannot_be_drawn_from_ends_there_and_hurts_no_other() -> None:
    rig = Rig()
    good = DraftRow(metadata(opened(2, temperature=1.0)), rig.sequence([1, 2, 3, 4]), [5], 4, 5)
    bad = DraftRow(metadata(opened(3, temperature=1.0)), rig.sequence([1, 2, 3, 4]), [POISON % VOCAB_SIZE], 4, 5)
    batched = as_batch([bad, good])
    command = rig.loop.command_for(plan_draft_batch(rig.table, batched))
    rig.loop.run(loop_of(command), command.numbers)
    flight = BatchInFlight(rig.loop, loop_of(command), batched, rig.table)
    found = flight.finish()
    flight.postprocess()
    assert isinstance(found, list)
    check(found[1], one_by_one(good, [1, 2, 3, 4]))
    assert isinstance(found[0].error, NonFiniteLogitsError)
    assert bad.sequence.token_ids == [1, 2, 3, 4, POISON % VOCAB_SIZE]
    assert good.sequence.token_ids == [1, 2, 3, 4, 5, *found[1].token_ids[:3]]
    rig.table.check_integrity()


def test_sequences_are_as_they_were_when_nothing_came_of_a_plan() -> None:
    rig = Rig()
    row = DraftRow(metadata(opened(2, temperature=1.0)), rig.sequence([1, 2, 3, 4, 7]), [5], 9, 4)
    plan_draft_batch(rig.table, as_batch([row]))
    assert len(row.sequence.page_table) == 3
    restore_sequences(rig.table, [row.sequence])
    assert row.sequence.token_ids == [1, 2, 3, 4, 7]
    rig.table.check_integrity()


def test_what_fills_up_a_shape_writes_nothing() -> None:
    rig = Rig()
    text = [1, 2, 3]
    row = DraftRow(metadata(opened(1, temperature=0.8)), rig.sequence(text), [4], 3, 4)
    before = rig.kv.clone()
    check(rig.draft([row], LoopShape(4, 6, 2))[0], one_by_one(row, text))
    table = row.sequence.page_table
    written = {table[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(3, 6)}
    changed = (rig.kv != before).any(1).nonzero().flatten().tolist()
    assert set(changed) == written


def test_a_row_that_cannot_be_drawn_from_ends_there_and_hurts_no_other() -> None:
    rig = Rig()
    good = DraftRow(metadata(opened(2, temperature=1.0)), rig.sequence([1, 2, 3, 4]), [5], 4, 5)
    bad = DraftRow(metadata(opened(3, temperature=0.0)), rig.sequence([1, 2, 3, 4]), [POISON % VOCAB_SIZE], 4, 5)
    barred = replace(opened(4), num_token_ids=1, banned_token_ids=(0,))
    nothing = DraftRow(metadata(barred), rig.sequence([9]), [8, 7], 2, 3)
    found = rig.draft([bad, good, nothing])
    check(found[1], one_by_one(good, [1, 2, 3, 4]))
    assert [len(draws.token_ids) for draws in found] == [0, 4, 0]
    assert isinstance(found[0].error, NonFiniteLogitsError)
    assert isinstance(found[2].error, InvalidRequestError)


def test_a_bound_that_no_text_reaches_is_told_to_a_device_all_the_same() -> None:
    endless = replace(opened(1, temperature=0.0, min_tokens=2**31), eos_token_ids=(3,))
    assert (
        metadata(endless).words
        == metadata(replace(endless, sampling=replace(endless.sampling, min_tokens=2**40))).words
    )


@pytest.mark.parametrize("method", [AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED])
def test_what_a_loop_leaves_to_the_target_is_not_in_its_law(method: AcceptanceMethod) -> None:
    """Tokens and evidence are those of the request without penalties, biases and bad words."""
    left: dict[str, Any] = {
        "presence_penalty": 1.5, "repetition_penalty": 1.2, "logit_bias": ((3, 5.0),), "bad_words": ((7,),)
    }  # fmt: skip
    rig, text = Rig(), [1, 2, 3]
    row = DraftRow(metadata(opened(5, method, temperature=0.8, top_p=0.9, **left)), rig.sequence(text), [4], 5, 4)
    plain = replace(row, metadata=metadata(opened(5, method, temperature=0.8, top_p=0.9)))
    check(rig.draft([row])[0], one_by_one(plain, text))


def test_rows_are_filled_up_to_a_number_that_is_captured() -> None:
    rig = Rig()
    rig.loop.capture(NoGraphs(), CaptureBound(CaptureLimits(), rig.loop.num_graphs), lambda done: None)
    for rows, padded in ((1, 1), (3, 4), (9, 16)):
        pairs = [random_row(rig, random.Random(i)) for i in range(rows)]
        command = rig.loop.command_for(plan_draft_batch(rig.table, DraftBatch.of([row for row, _ in pairs])))
        assert loop_of(command).num_rows == padded
        for row, _ in pairs:
            rig.table.release(row.sequence)


def test_captured_steps_draw_what_launched_ones_do() -> None:
    """Captured steps that the bound of memory leaves out draw the same, too."""
    choose = random.Random(3)
    for limit in (None, 0):
        rig = Rig()
        bound = CaptureBound(CaptureLimits(limit), rig.loop.num_graphs)
        rig.loop.capture(NoGraphs(), bound, lambda done: None)
        assert bound.num_graphs == (rig.loop.num_graphs if limit is None else 0)
        pairs = [random_row(rig, choose) for _ in range(3)]
        for (row, text), drawn in zip(pairs, rig.draft([row for row, _ in pairs]), strict=True):
            check(drawn, one_by_one(row, text))
