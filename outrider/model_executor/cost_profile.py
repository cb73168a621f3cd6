"""Cost profile: step times of a loaded model, measured once at start over a grid of batch sizes and lengths.

Forwards of a target and proposals of a draft are run as a service runs them, over sequences whose KV is not computed:
its values do not change the time. Every rank of a model takes part, as in any forward. Knows no sessions and links.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.errors import OutriderError
from outrider.kernels.device_stream import mark_reached
from outrider.kv_cache import KVCacheManager, KVSequence
from outrider.model_executor.draft_heads.runner import DraftHeadRunner
from outrider.model_executor.draft_heads.state_rows import HeadStateRows
from outrider.model_executor.draft_loop import DraftMetadata, DraftRow
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import Open
from outrider.types import JudgingRule, SamplingParams, StepCost

_log = logging.getLogger(__name__)

SHORT_CONTEXT, LONG_CONTEXT = 128, 2048
"""Tokens in each session's KV cache: of all points, and of one point a batch size that shows what a context costs."""
_GPU_ROWS, _CPU_ROWS = (1, 16, 64, 256, 4), (1, 8)
"""Batch sizes, the most informative first: a bound may leave out the last."""
_GPU_LENGTHS, _CPU_LENGTHS = (1, 2, 4, 6, 9), (1, 5)
"""Tokens of a session in a forward; draft tokens of a proposal."""
_NUM_REPEATS = 3
"""Runs after a first one; the shortest counts, for another process on the device can only lengthen one."""

_STRIDE = 7919
"""Stride between the tokens of rows and positions, a prime: different tokens meet different experts, as those of users
do.
"""

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Grid:
    """Batch sizes and lengths of a profile."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, *, is_gpu: bool, max_rows: int, max_length: int) -> Grid:
        """Points up to the limits; the largest length is a limit itself."""
        rows, lengths = (_GPU_ROWS, _GPU_LENGTHS) if is_gpu else (_CPU_ROWS, _CPU_LENGTHS)
        kept = tuple(length for length in lengths if length <= max_length)
        return cls(tuple(count for count in rows if count <= max_rows), kept or (max_length,))


class StepRunner(Protocol):
    """Steps of one service."""

    sequences: KVCacheManager
    max_model_len: int

    def step(self, sequences: Sequence[KVSequence], length: int) -> Step:
        """Step that adds at most ``length`` + 1 tokens to each sequence and waits for the device."""
        ...


def measure(runner: StepRunner, grid: Grid, bound_s: float) -> tuple[StepCost, ...]:
    """Shortest duration at each point of the grid, one batch size after the other.

    No new batch size begins ``bound_s`` seconds after the start; none is measured at all where that is 0. Points for
    which the KV cache has no room are left out.
    """
    found: list[StepCost] = []
    with _surviving_failures():
        _measure_into(found, runner, grid, bound_s)
    return tuple(found)


def _measure_into(found: list[StepCost], runner: StepRunner, grid: Grid, bound_s: float) -> None:
    deadline = time.perf_counter() + bound_s
    for rows in grid.rows:
        if time.perf_counter() >= deadline:
            break
        points = [(length, SHORT_CONTEXT) for length in grid.lengths] + [(1, LONG_CONTEXT)]
        for length, context in points:
            with _filled(runner, rows, context, length) as sequences:
                if sequences:
                    found.append(StepCost(rows, length, context, _shortest_ns(runner, sequences, length)))


@contextlib.contextmanager
def _surviving_failures() -> Iterator[None]:
    """A point that fails, as for lack of memory, ends the measurement and not the service: others are kept."""
    try:
        yield
    except (OutriderError, RuntimeError, ValueError) as error:
        _log.warning("the measurement of step costs ended early: %s: %s", type(error).__name__, error)


@contextlib.contextmanager
def _filled(runner: StepRunner, rows: int, context: int, length: int) -> Iterator[list[KVSequence]]:
    """Sequences of ``context`` tokens whose KV is not computed; none where there is no room for them."""
    manager, longest = runner.sequences, context + length + 1
    has_capacity = longest <= runner.max_model_len and manager.surely_fit(rows, longest)
    has_capacity = has_capacity and (manager.states is None or manager.states.pool.num_free >= rows)
    salt = secrets.token_hex(16)  # so that no request finds what was not computed
    sequences = [manager.open(longest, salt) for _ in range(rows if has_capacity else 0)]
    try:
        for sequence in sequences:
            manager.extend(sequence, [0] * context)
        manager.set_states_back(sequences)
        yield sequences
    finally:
        for sequence in sequences:
            manager.release(sequence)


def _shortest_ns(runner: StepRunner, sequences: Sequence[KVSequence], length: int) -> int:
    context, times = sequences[0].length, []
    run = runner.step(sequences, length)
    for _ in range(1 + _NUM_REPEATS):
        began = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - began)
        for sequence in sequences:
            runner.sequences.truncate(sequence, context)
        runner.sequences.set_states_back(sequences)
    return min(times[1:])


class TargetSteps:
    """Forwards that score ``length`` tokens of each session."""

    def __init__(self, runner: ModelRunner) -> None:
        self.sequences, self.max_model_len, self._runner = runner.sequences, runner.max_model_len, runner

    def step(self, sequences: Sequence[KVSequence], length: int) -> Step:
        """Forward with logits after each token."""
        size = self._runner.config.vocab_size
        rows = [ForwardRow(each, _tokens(row, length, size), length) for row, each in enumerate(sequences)]

        def run() -> None:
            self._runner.forward_batch(RowBatch.of(rows))
            mark_reached(self._runner.device)()

        return run


class DraftSteps:
    """Proposals of ``length`` draft tokens for each session: a loop on a GPU, forwards one by one on a CPU."""

    def __init__(self, runner: ModelRunner) -> None:
        self.sequences, self.max_model_len, self._runner = runner.sequences, runner.max_model_len, runner
        self._metadata = _greedy(runner.config.vocab_size, runner.max_model_len)

    def step(self, sequences: Sequence[KVSequence], length: int) -> Step:
        """Proposal after one committed token."""
        if self._runner.drafting is None:
            return lambda: self._forwards(sequences, length)
        size = self._runner.config.vocab_size
        rows = [
            DraftRow(self._metadata, each, _tokens(row, 1, size), length, each.length + 1)
            for row, each in enumerate(sequences)
        ]
        return lambda: self._runner.draft(rows)

    def _forwards(self, sequences: Sequence[KVSequence], length: int) -> None:
        size = self._runner.config.vocab_size
        for _ in range(length):
            rows = [ForwardRow(each, _tokens(row, 1, size)) for row, each in enumerate(sequences)]
            self._runner.forward(rows).argmax(-1)


class HeadSteps:
    """Proposals of a draft head in a loop on a GPU, after one pair of a token and the target's states."""

    def __init__(self, runner: DraftHeadRunner) -> None:
        self.sequences, self.max_model_len, self._runner = runner.sequences, runner.max_model_len, runner
        self._metadata = _greedy(runner.head.config.layer.vocab_size, runner.max_model_len)

    def step(self, sequences: Sequence[KVSequence], length: int) -> Step:
        """Proposal after one committed token."""
        config = self._runner.head.config
        width = config.target_hidden_size * len(config.hidden_state_layers)
        states = torch.zeros(len(sequences), width, dtype=self._runner.head.dtype, device=self._runner.device)
        rows = [DraftRow(self._metadata, each, [0], length, each.length + 2, kv_offset=1) for each in sequences]
        return lambda: self._runner.draft(rows, HeadStateRows([states]))


def _tokens(row: int, count: int, vocab_size: int) -> list[int]:
    """Tokens of a row, others than those of the rows beside it."""
    return [(row * count + number) * _STRIDE % vocab_size for number in range(count)]


def profile_target(runner: ModelRunner, *, max_rows: int, max_length: int, bound_s: float) -> tuple[StepCost, ...]:
    """Profile of a target that scores up to ``max_length`` draft tokens of a session."""
    grid = Grid.of(is_gpu=runner.worker.is_on_gpu, max_rows=max_rows, max_length=max_length + 1)
    return _without_counting(runner, TargetSteps(runner), grid, bound_s)


def profile_draft(runner: ModelRunner, *, max_rows: int, max_length: int, bound_s: float) -> tuple[StepCost, ...]:
    """Profile of a draft model; empty where it may draft nothing."""
    if not max_length:
        return ()
    grid = Grid.of(is_gpu=runner.worker.is_on_gpu, max_rows=max_rows, max_length=max_length)
    return _without_counting(runner, DraftSteps(runner), grid, bound_s)


def profile_head(runner: DraftHeadRunner, *, max_length: int, bound_s: float) -> tuple[StepCost, ...]:
    """Profile of a draft head; empty where it has no loops, as on a CPU."""
    if not (runner.max_draft_rows and max_length):
        return ()
    return measure(
        HeadSteps(runner), Grid.of(is_gpu=True, max_rows=runner.max_draft_rows, max_length=max_length), bound_s
    )


def _without_counting(runner: ModelRunner, steps: StepRunner, grid: Grid, bound_s: float) -> tuple[StepCost, ...]:
    count = runner.num_forwards
    found = measure(steps, grid, bound_s)
    runner.num_forwards = count
    return found


def _greedy(vocab_size: int, max_length: int) -> DraftMetadata:
    request = Open(
        session=0,
        generation=0,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        judging_rule=JudgingRule.GREEDY,
        prompt_length=1,
        max_length=max_length,
        num_token_ids=vocab_size,
    )
    return DraftMetadata.of(request, vocab_size)
