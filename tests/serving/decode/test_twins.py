"""Columns served as decode batches and item by item: the same answers, texts and pages under random loads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.benchmarks.step.stand_in import VOCAB_SIZE, StandInExecutor, new_session_registry, propose
from outrider.errors import NonFiniteLogitsError
from outrider.model_executor.draft_heads.runner import DraftHeadRunner
from outrider.model_executor.draft_heads.state_rows import HeadStateRows
from outrider.model_executor.draft_loop import DraftRow
from outrider.model_executor.draft_loop.batched import DraftBatch
from outrider.model_executor.draft_loop.results import DrawnBatch, Draws
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import AttentionWindow
from outrider.ports import EventBatch
from outrider.serving.decode import lookahead_steps
from outrider.serving.engine_core import EngineCore
from outrider.serving.session import Limits
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.token_budget import TokenBudget
from outrider.types import SparseEvidence
from outrider_draft.proposers.draft_model import ModelProposer
from outrider_target.executor import TargetExecutor
from tests.draft_service.head_rig import served
from tests.serving.decode.state_twins import HeadTwins, PutStates, ReadStates, StatesTwins
from tests.serving.decode.twins import GREEDY, SAMPLED, TOKENS, PlainTwins, Samplings, Switch, Twins, holding
from tests.support.dflash import build_dflash
from tests.support.eagle3 import build_eagle3
from tests.support.tiny_models import cached_tiny_model

NUM_TOKEN_IDS = 257
Core = EngineCore[Any, Any, Any, Any]


def target_core(switch: Switch, *, takes_batch: bool, num_pages: int, max_batched_tokens: int = 64) -> tuple[Core, Any]:
    folder = cached_tiny_model("llama", seed=1, max_position_embeddings=512)
    runner = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=num_pages, max_model_len=320)
    executor = holding(TargetExecutor, switch)(runner)
    limits = Limits(runner.config.vocab_size, runner.max_model_len, trims=False)
    table = SessionRegistry(runner.sequences, limits)
    budget = TokenBudget(max_batched_tokens=max_batched_tokens, max_mixed_prefill_tokens=32)
    return EngineCore(table, executor, budget, lookahead=True, takes_batch=takes_batch, clock=switch.clock), executor


def draft_core(switch: Switch, *, takes_batch: bool) -> tuple[Core, Any]:
    answer = functools.partial(propose, acceptance=0.7)
    executor = holding(StandInExecutor, switch)(answer, busy_s=0.0, note=lambda _what, _items: None)
    return EngineCore(new_session_registry(), executor, takes_batch=takes_batch, clock=switch.clock), executor


@pytest.mark.parametrize(
    ("seed", "num_pages", "samplings"),
    [
        (0, 1200, TOKENS),
        pytest.param(1, 1200, GREEDY, marks=pytest.mark.integration),
        pytest.param(2, 500, TOKENS, marks=pytest.mark.integration),
        (3, 1200, SAMPLED),
        (4, 500, SAMPLED[1:2]),
    ],
)
def test_a_target_says_and_holds_the_same(seed: int, num_pages: int, samplings: Samplings) -> None:
    switch = Switch()
    steady, executor = target_core(switch, takes_batch=True, num_pages=num_pages)
    plain, other = target_core(switch, takes_batch=False, num_pages=num_pages)
    twins = Twins("target", steady, plain, switch, seed, num_token_ids=NUM_TOKEN_IDS, samplings=samplings)
    twins.run(120)
    assert executor.num_columns > 20, twins.outcomes
    assert other.num_columns == 0
    assert twins.outcomes["Scores"] > 500
    assert twins.outcomes["logprobs"] > 40
    assert twins.outcomes["SessionLost"] + twins.outcomes["SessionFailed"]
    for core in (steady, plain):
        assert core.num_pages_free == num_pages


@pytest.mark.parametrize(
    ("seed", "num_pages", "samplings"),
    [(0, 3000, TOKENS), pytest.param(1, 3000, GREEDY, marks=pytest.mark.integration), (2, 600, TOKENS)],
)
def test_a_target_says_and_holds_the_same_of_plain_steps(
    seed: int, num_pages: int, samplings: Samplings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead_steps, "FEWEST_SESSIONS", 4)
    switch = Switch()
    steady, executor = target_core(switch, takes_batch=True, num_pages=num_pages)
    plain, other = target_core(switch, takes_batch=False, num_pages=num_pages)
    twins = PlainTwins("target", steady, plain, switch, seed, num_token_ids=NUM_TOKEN_IDS, samplings=samplings)
    twins.run(60)
    assert executor.num_plain > 20, twins.outcomes
    assert other.num_plain == 0
    assert twins.outcomes["Scores"] > 300
    for core in (steady, plain):
        assert core.num_pages_free == num_pages


def test_a_step_past_the_token_budget_goes_item_by_item() -> None:
    switch = Switch()
    steady, executor = target_core(switch, takes_batch=True, num_pages=1200, max_batched_tokens=7)
    plain, _ = target_core(switch, takes_batch=False, num_pages=1200, max_batched_tokens=7)
    twins = Twins("target", steady, plain, switch, 3, num_token_ids=NUM_TOKEN_IDS)
    twins.run(30)
    assert twins.outcomes["columns"] > 10
    assert executor.num_columns == 0  # the fewest sessions of a step, with a token and a draft token each, are 8 tokens


def test_a_prompt_finds_its_pages_beside_a_step_that_was_split() -> None:
    switch = Switch()
    steady, executor = target_core(switch, takes_batch=True, num_pages=1200)
    plain, _ = target_core(switch, takes_batch=False, num_pages=1200)
    twins = Twins("target", steady, plain, switch, 1, num_token_ids=NUM_TOKEN_IDS)
    twins.begin_beside_a_split_step()
    assert executor.num_columns > 4
    assert not twins.outcomes["SessionFailed"]


def drawn_by_forwards(runner: ModelRunner, rows: Sequence[DraftRow]) -> list[Draws]:
    """Draws of a loop for greedy rows, by one forward a token; without its last draw, a row draws nothing."""
    found = []
    for row in rows:
        ids, drawn = list(row.token_ids), list[int]()
        for _ in range(row.num_drafts):
            logits = runner.forward([ForwardRow(row.sequence, ids)])
            drawn.append(int(logits[0, :NUM_TOKEN_IDS].argmax()))
            ids = drawn[-1:]
        fails = row.sequence.length % 97 == 0
        evidence = supports_of(drawn) if row.metadata.needs_evidence else None
        found.append(Draws((), error=NonFiniteLogitsError("not a number")) if fails else Draws(tuple(drawn), evidence))
    return found


class DrawnByForwards:
    """``begin_draft`` by the same: as arrays where all rows have draws. Until it is settled, sequences hold zeros."""

    def __init__(self, runner: ModelRunner, batched: DraftBatch) -> None:
        runner.sequences.replace_tails(batched.sequences, batched.lengths, [()] * len(batched.sequences))
        self._arrays, self._drawn = batched, drawn_by_forwards(runner, batched.rows())
        self._manager, self._texts = runner.sequences, [list(one.token_ids) for one in batched.sequences]
        for sequence, context in zip(batched.sequences, batched.contexts, strict=True):
            self._manager.replace_tails([sequence], [context], [[0] * (sequence.length - context)])

    def postprocess(self) -> None:
        tails = [text[context:] for text, context in zip(self._texts, self._arrays.contexts, strict=True)]
        self._manager.replace_tails(self._arrays.sequences, self._arrays.contexts, tails)

    def finish(self) -> DrawnBatch | list[Draws]:
        if any(draws.error is not None for draws in self._drawn):
            return self._drawn
        ids = np.array([token_id for draws in self._drawn for token_id in draws.token_ids], dtype=np.int32)
        has_supports = self._arrays.metadata.needs_evidence
        return DrawnBatch(self._arrays.num_drafts, ids, supports_of(ids.tolist()) if has_supports else None)


def supports_of(drawn: Sequence[int]) -> SparseEvidence:
    ids = np.array([one for token_id in drawn for one in (token_id, 0)], dtype=np.int32)
    return SparseEvidence(np.full(len(drawn), 2, dtype=np.int32), ids, (ids / NUM_TOKEN_IDS).astype(np.float32))


def model_core(
    switch: Switch, *, takes_batch: bool, max_model_len: int = 280, window: AttentionWindow | None = None
) -> tuple[Core, Any]:
    folder = cached_tiny_model("llama", seed=1, max_position_embeddings=1024)
    runner = ModelRunner.load(
        folder, dtype="float32", page_size=4, num_pages=1200, max_model_len=max_model_len, attention_window=window
    )
    runner.draft = functools.partial(drawn_by_forwards, runner)  # type: ignore[method-assign]
    runner.begin_draft = functools.partial(DrawnByForwards, runner)  # type: ignore[method-assign,assignment]
    executor = holding(ModelProposer, switch, asynchronous=False)(runner)
    executor.can_loop, executor.max_rows = True, 8
    limits = Limits(runner.config.vocab_size, runner.max_model_len, trims=True)
    table = SessionRegistry(executor.sequences, limits)
    return EngineCore(table, executor, takes_batch=takes_batch, clock=switch.clock), executor


class LongTwins(Twins):
    """Texts of which a draft with a window computes the end. How many pages have left the window by the time of a
    report depends on whether it leaves before texts are brought up to date.
    """

    max_length = 700
    prompt_lengths = (2, 30, 281, 281, 560)

    def _as_read(self, batch: EventBatch[Any]) -> tuple[Any, ...]:
        *read, report = super()._as_read(batch)
        return (*read, report and report[0])

    def _pages_of(self, sequence: Any) -> list[int]:
        return [sequence.kv_offset, len(sequence.kv.held_pages())]


@pytest.mark.parametrize("samplings", [pytest.param(GREEDY, marks=pytest.mark.integration), SAMPLED])
def test_a_draft_with_a_window_says_and_holds_the_same(samplings: Samplings) -> None:
    switch, window = Switch(), AttentionWindow(20, 2)
    cores = [model_core(switch, takes_batch=takes, max_model_len=690, window=window) for takes in (True, False)]
    (steady, executor), (plain, other) = cores
    twins = LongTwins("draft", steady, plain, switch, 3, num_token_ids=NUM_TOKEN_IDS, samplings=samplings)
    twins.run(100)
    assert executor.num_columns > 20, twins.outcomes
    assert other.num_columns == 0
    assert twins.outcomes["SessionLost"]
    assert steady.num_pages_free == plain.num_pages_free == 1200
    for one in (executor, other):
        one.runner.sequences.check_integrity()


@pytest.mark.parametrize("samplings", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.integration)])
def test_a_draft_model_says_and_holds_the_same(samplings: Samplings) -> None:
    switch = Switch()
    steady, executor = model_core(switch, takes_batch=True)
    plain, other = model_core(switch, takes_batch=False)
    twins = Twins("draft", steady, plain, switch, 3, num_token_ids=NUM_TOKEN_IDS, samplings=samplings)
    twins.run(100)
    assert executor.num_columns > 20, twins.outcomes
    assert other.num_columns == 0
    assert twins.outcomes["SessionFailed"]
    assert steady.num_pages_free == plain.num_pages_free == 1200


@pytest.mark.parametrize(("seed", "samplings"), [(0, GREEDY), (1, GREEDY), (2, SAMPLED), (3, (*GREEDY, *SAMPLED))])
def test_a_draft_says_and_holds_the_same(seed: int, samplings: Samplings) -> None:
    switch = Switch()
    steady, executor = draft_core(switch, takes_batch=True)
    plain, other = draft_core(switch, takes_batch=False)
    twins = Twins("draft", steady, plain, switch, seed, num_token_ids=VOCAB_SIZE, samplings=samplings)
    twins.run(120)
    assert executor.num_columns > (40 if len(samplings) < 4 else 0), twins.outcomes
    assert other.num_columns == 0
    assert twins.outcomes["Proposal"] > 500


def pairs_drawn_by_forwards(runner: DraftHeadRunner, rows: Sequence[DraftRow], states: HeadStateRows) -> list[Draws]:
    """Draws of a head's loop for greedy rows, by one forward a token; now and then a row draws nothing."""
    found, first = [], 0
    for row in rows:
        ids, drawn = list(row.token_ids), list[int]()
        own = torch.empty(len(ids), states.parts[0].shape[1])
        states.copy_to(own, first)
        hidden, normed = runner.feed([ForwardRow(row.sequence, ids, 0)], [own])
        first += len(ids)
        for number in range(row.num_drafts):
            drawn.append(int(runner.head.logits(normed[-1:])[0, :NUM_TOKEN_IDS].argmax()))
            if number < row.num_drafts - 1:
                hidden, normed = runner.forward([ForwardRow(row.sequence, drawn[-1:], 0)], hidden[-1:])
        fails = row.base % 97 == 0
        found.append(Draws((), error=NonFiniteLogitsError("not a number")) if fails else Draws(tuple(drawn)))
    return found


class PairsDrawnByForwards:
    """``begin_draft`` of a head by the same."""

    def __init__(self, runner: DraftHeadRunner, batched: DraftBatch, states: HeadStateRows) -> None:
        assert [sequence.length for sequence in batched.sequences] == batched.lengths
        self._arrays, self._drawn = batched, pairs_drawn_by_forwards(runner, batched.rows(), states)
        for sequence, length in zip(batched.sequences, batched.contexts, strict=True):
            runner.sequences.truncate(sequence, length)

    def finish(self) -> DrawnBatch | list[Draws]:
        if any(draws.error is not None for draws in self._drawn):
            return self._drawn
        ids = [token_id for draws in self._drawn for token_id in draws.token_ids]
        return DrawnBatch(self._arrays.num_drafts, np.array(ids, dtype=np.int32), None)

    def postprocess(self) -> None:
        """Pairs of drafted tokens are not held."""


def head_core(
    switch: Switch, folders: tuple[Path, Path], method: str, *, takes_batch: bool, loops: bool
) -> tuple[Core, Any]:
    """A head, with or without loops."""
    given = served(method, *folders, "--num-pages", "1200", "--max-model-len", "256")
    runner: Any = given.executor.runner  # type: ignore[attr-defined]
    if loops:
        runner.draft = functools.partial(pairs_drawn_by_forwards, runner)
        runner.begin_draft = functools.partial(PairsDrawnByForwards, runner)
        runner.__class__ = type("Looping", (type(runner),), {"max_prefill": 17, "max_draft_rows": 8})
    executor = holding(type(given.executor), switch, asynchronous=False)(runner)
    limits = Limits(runner.head.config.layer.vocab_size, runner.max_model_len, trims=True)
    table = SessionRegistry(executor.sequences, limits)
    return EngineCore(table, executor, takes_batch=takes_batch, references=ReadStates(), clock=switch.clock), executor


@pytest.mark.parametrize(
    ("method", "loops", "samplings"),
    [("eagle3", True, GREEDY), ("eagle3", False, TOKENS), ("eagle3", False, SAMPLED), ("dflash", False, SAMPLED)],
)
def test_a_head_says_and_holds_the_same(method: str, samplings: Samplings, tmp_path: Path, *, loops: bool) -> None:
    target = cached_tiny_model("llama", seed=1)
    folders = (build_dflash if method == "dflash" else build_eagle3)(tmp_path), target
    switch = Switch()
    steady, executor = head_core(switch, folders, method, takes_batch=True, loops=loops)
    plain, other = head_core(switch, folders, method, takes_batch=False, loops=loops)
    width = executor.width
    twins = HeadTwins(steady, plain, switch, 5, num_token_ids=NUM_TOKEN_IDS - 1, width=width, samplings=samplings)
    twins.run(100 if loops else 50)
    assert executor.num_columns > 10, twins.outcomes
    assert other.num_columns == 0
    assert twins.outcomes["answers in columns"] > 10, twins.outcomes
    assert twins.outcomes["SessionLost"], twins.outcomes
    assert twins.outcomes["SessionFailed"] or not loops, twins.outcomes
    assert steady.num_pages_free == plain.num_pages_free


@pytest.mark.parametrize("seed", range(2))
def test_a_target_hands_over_the_same_states(seed: int) -> None:
    switch = Switch()
    cores = []
    for takes_batch in (True, False):
        core, executor = target_core(switch, takes_batch=takes_batch, num_pages=1200)
        executor.planes = PutStates()
        cores.append((core, executor))
    (steady, executor), (plain, other) = cores
    planes = (executor.planes, other.planes)
    twins = StatesTwins(planes, steady, plain, switch, seed, num_token_ids=NUM_TOKEN_IDS)
    twins.run(80)
    assert executor.num_columns > 10, twins.outcomes
    assert other.num_columns == 0
    assert twins.outcomes["SessionFailed"], twins.outcomes
    assert executor.planes.sent_bytes == other.planes.sent_bytes
    assert min(executor.planes.sent_bytes[kind] for kind in ("fake", "inline")) > 0
