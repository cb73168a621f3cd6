"""Recurrent layers through a runner: any number of accepted drafts, chunks, snapshots and forks give the reference's
logits, and a state that is a token too far does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.errors import ConfigError, InvalidRequestError, OutOfPagesError
from outrider.kv_cache import KVSequence
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import (
    TOLERANCE,
    Scripted,
    build,
    forward_and_check,
    open_scripted,
    poisoned_runner,
    random_ids,
    reference_logits,
)

PAGE_SIZE = 4


@pytest.fixture(scope="module")
def folder() -> Path:
    return build("qwen3_5_text")


def prefilled(runner: ModelRunner, folder: Path, text: list[int]) -> Scripted:
    scripted = open_scripted(runner, folder, 250)
    forward_and_check(runner, (scripted, text, 1))
    runner.sequences.commit(scripted.sequence, len(text))
    return scripted


@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_any_number_of_accepted_drafts_is_exact(folder: Path, num_drafts: int) -> None:
    """Many steps, so that the state moves past accepted tokens and past none that was not."""
    runner = poisoned_runner(folder, page_size=PAGE_SIZE)
    scripted, drafts = prefilled(runner, folder, random_ids(70, seed=1)), iter(random_ids(1000, seed=2))
    for num_accepted in (*range(num_drafts + 1), 0, num_drafts, num_drafts):
        base = scripted.sequence.length + 1
        forward_and_check(runner, (scripted, [next(drafts) for _ in range(1 + num_drafts)], None))
        runner.sequences.commit(scripted.sequence, base)
        runner.sequences.truncate(scripted.sequence, base + num_accepted)
    assert scripted.sequence.state is not None
    assert scripted.sequence.state.length > 70


@pytest.mark.parametrize("error", [-1, 1])
def test_a_state_that_is_one_token_off_is_found(folder: Path, error: int) -> None:
    runner = poisoned_runner(folder, page_size=PAGE_SIZE)
    text = random_ids(90, seed=3)
    scripted = prefilled(runner, folder, text[:70])
    for _ in range(2):  # after which the state lies before the end
        forward_and_check(runner, (scripted, random_ids(5, seed=4), None))
        runner.sequences.commit(scripted.sequence, scripted.sequence.length - 4)
        runner.sequences.truncate(scripted.sequence, scripted.sequence.length - 2)
    assert scripted.sequence.state is not None
    scripted.sequence.state.length += error
    logits = runner.forward([scripted.row([7], 1)])
    expected = reference_logits(folder, scripted.sequence.token_ids)[-1:]
    assert (logits - expected).abs().max() > 10 * TOLERANCE


def test_chunks_of_any_length_give_the_same_logits(folder: Path) -> None:
    runner = poisoned_runner(folder, page_size=PAGE_SIZE)
    text = random_ids(150, seed=5)
    for chunk in (1, 3, 16, 63, 64, 65, 149):
        scripted = open_scripted(runner, folder, 150)
        for start in range(0, 150, chunk):
            forward_and_check(runner, (scripted, text[start : start + chunk], None))
        runner.sequences.release(scripted.sequence)


def test_a_cached_prompt_begins_at_a_snapshot(folder: Path) -> None:
    runner = poisoned_runner(folder, page_size=PAGE_SIZE)
    text = random_ids(100, seed=6)
    first = prefilled(runner, folder, text)
    forward_and_check(runner, (first, [1, 2, 3], None))  # the snapshot is made before
    second, third = open_scripted(runner, folder, 200), open_scripted(runner, folder, 200)
    assert runner.sequences.adopt_prefix(second.sequence, text) == 96
    assert runner.sequences.adopt_prefix(third.sequence, [*text[:96], *random_ids(30, seed=7)]) == 96
    forward_and_check(runner, (third, random_ids(30, seed=7), None), (first, [4], None), (second, text[96:], None))
    runner.sequences.release(first.sequence)
    forward_and_check(runner, (second, [5, 6], None), (third, [7], None))


def test_snapshots_along_a_text_are_found_by_others(folder: Path) -> None:
    runner = ModelRunner.load(folder, page_size=PAGE_SIZE, num_pages=100, snapshot_interval=32)
    text = random_ids(150, seed=11)
    first, other = open_scripted(runner, folder, 200), open_scripted(runner, folder, 200)
    for start in range(0, 150, 5):
        forward_and_check(runner, (first, text[start : start + 5], 1))
        runner.sequences.commit(first.sequence, start + 5)
    assert runner.sequences.adopt_prefix(other.sequence, [*text[:110], *random_ids(9, seed=12)]) == 96
    forward_and_check(runner, (other, [*text[96:110], *random_ids(9, seed=12)], None))


def test_forks_go_on_by_themselves_from_a_state(folder: Path) -> None:
    runner = poisoned_runner(folder, page_size=PAGE_SIZE)
    root = prefilled(runner, folder, random_ids(80, seed=8))
    branches = [root]
    for _ in range(2):
        branches.append(Scripted(runner, folder, runner.sequences.fork(branches[-1].sequence, 120)))
    forward_and_check(runner, *((branch, [number, 3], None) for number, branch in enumerate(branches)))
    runner.sequences.release(root.sequence)
    forward_and_check(runner, *((branch, [9, number, 4], None) for number, branch in enumerate(branches[1:])))


def test_a_failed_forward_leaves_no_half_moved_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = poisoned_runner(folder, page_size=PAGE_SIZE)
    scripted = prefilled(runner, folder, random_ids(20, seed=9))
    with monkeypatch.context() as patch:
        patch.setattr(runner.worker.model, "logits", fail)
        with pytest.raises(RuntimeError, match="device"):
            runner.forward([scripted.row([1], 1)])
    with pytest.raises(InvalidRequestError, match="is gone"):
        runner.forward([scripted.row([1], 1)])
    runner.sequences.truncate(scripted.sequence, 0)
    forward_and_check(runner, (scripted, random_ids(20, seed=9), None))


def fail(*_: object) -> torch.Tensor:
    raise RuntimeError("the device")


def test_slots_are_as_many_as_are_asked_for_or_fit(folder: Path) -> None:
    runner = ModelRunner.load(folder, num_pages=50, num_state_slots=2)
    held: list[KVSequence] = [runner.sequences.open(10) for _ in range(2)]
    with pytest.raises(OutOfPagesError):
        runner.sequences.open(10)
    runner.sequences.release(held[0])
    runner.forward([ForwardRow(runner.sequences.open(10), [1])])
    layout = runner.kv_cache.layout
    assert layout.states is not None
    slot, token = layout.states.bytes_per_slot(4), layout.bytes_per_token(4)
    sized = ModelRunner.load(folder, kv_cache_bytes=10 * slot, max_model_len=64)
    assert sized.kv_cache.num_state_slots == 5
    assert sized.sequences.pool.num_pages == 5 * slot // (16 * token)
    with pytest.raises(ConfigError, match="hold no state of a sequence"):
        ModelRunner.load(folder, kv_cache_bytes=slot)
