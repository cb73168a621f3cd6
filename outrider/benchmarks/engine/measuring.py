"""Forwards and draft loops of one loaded model, timed.

Owns the sequences it times. A forward is what a target does for each step: some tokens a row, logits after each. A
draft loop is what a draft does for each proposal: one forward a token, each drawing the token of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider.benchmarks.engine.floor import timed_samples
from outrider.errors import ConfigError, OutriderError
from outrider.kv_cache import KVSequence
from outrider.model_executor.draft_loop import MAX_STEPS, DraftMetadata, DraftRow
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.row_batch import RowBatch
from outrider.ports import Open
from outrider.sampling import LogitRow, propose
from outrider.sampling.session import SessionSampling
from outrider.types import JudgingRule, SamplingParams

GATE_TOKENS = 8
_FILLED_AT_ONCE = 2048
"""Tokens of a forward that prefills."""
GREEDY = SamplingParams(temperature=0.0)
_IN_A_ROW = 8
"""Forwards that are timed together on a device: while one is computed, the next is prepared."""
_SEED = 1
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference between logits of one forward and of several, relative to the largest logit; FP8 models as
bfloat16 ones.
"""


class EngineGateError(OutriderError):
    """The engine contradicts itself: no figure is given."""


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the grid."""

    batch_size: int
    num_tokens: int
    """Tokens per row in a forward; in a draft loop, the draft length."""
    context: int
    """Tokens of each sequence after the forward, or before the draft loop."""
    sampling: SamplingParams = GREEDY
    """Sampling of a draft loop."""
    longest_context: int | None = None
    """Context of a forward's first row, if it differs from the other rows'."""
    layers: tuple[int, ...] = ()
    """Layers whose hidden states a forward returns."""

    @property
    def contexts(self) -> list[int]:
        """[B] of the rows."""
        return [self.longest_context or self.context, *[self.context] * (self.batch_size - 1)]


def check_against_single_tokens(runner: ModelRunner, *, num_tokens: int = GATE_TOKENS) -> float:
    """The largest difference of logits, over the largest logit, between one forward and as many as tokens.

    `EngineGateError` when it is past the dtype's tolerance.
    """
    tokens = _token_ids(runner, num_tokens, row=0)
    with _sequences(runner, [num_tokens] * 2) as (whole, single):
        at_once = runner.forward([ForwardRow(whole, tokens, num_tokens)])
        one_by_one = torch.cat([runner.forward([ForwardRow(single, [token], 1)]) for token in tokens])
    difference = float((at_once - one_by_one).abs().max() / one_by_one.abs().max())
    if not difference <= (tolerance := _tolerance(runner)):
        raise EngineGateError(
            f"{num_tokens} tokens in one forward and one at a time differ by {difference:.2g} of the largest logit, "
            f"more than {tolerance:g}"
        )
    return difference


def check_draft_loop(runner: ModelRunner, *, num_tokens: int = GATE_TOKENS) -> float:
    """Largest distance of the loop's tokens below the likeliest one, over the largest logit: 0 is greedy decoding.

    `EngineGateError` when it is past the dtype's tolerance.
    """
    prompt = _token_ids(runner, num_tokens, row=0)
    with _sequences(runner, [2 * num_tokens] * 2) as (drafting, scored):
        _fill(runner, [drafting], [num_tokens - 1])
        drafted = [tokens[0] for tokens in draft(runner, [drafting], prompt[-1:], num_tokens)]
        logits = runner.forward([ForwardRow(scored, prompt + drafted[:-1], num_tokens)])  # [T, V]
    chosen = logits[torch.arange(num_tokens), drafted]
    gap = float((logits.amax(-1) - chosen).max() / logits.abs().max())
    if not gap <= (tolerance := _tolerance(runner)):
        raise EngineGateError(
            f"a greedy draft loop's token lies {gap:.2g} of the largest logit below the likeliest one, more than "
            f"{tolerance:g}"
        )
    return gap


def _tolerance(runner: ModelRunner) -> float:
    return TOLERANCES[torch.bfloat16 if runner.config.quantization is not None else runner.dtype]


def time_forward(runner: ModelRunner, case: Case, *, num_samples: int, num_warmups: int) -> list[float]:
    """Seconds of a forward that ends at the case's contexts, logits after every token, of the type in which a target
    takes them.
    """
    with _forward(runner, case) as (forward, undo):
        return timed_samples(forward, runner.device, num_samples=num_samples, num_warmups=num_warmups, undo=undo)


def time_forward_on_device(runner: ModelRunner, case: Case, *, num_samples: int) -> list[float]:
    """Seconds that a GPU is busy with the forward of `time_forward`: several in a row, by the device's own clock."""
    with _forward(runner, case) as (forward, undo):

        def forward_and_undo() -> None:
            forward()
            undo()

        return [_device_seconds(forward_and_undo) for _ in range(num_samples)]


@contextmanager
def _forward(runner: ModelRunner, case: Case) -> Iterator[tuple[Callable[[], object], Callable[[], None]]]:
    """The case's forward, its sequences filled, and what undoes it."""
    if case.num_tokens > case.context:
        raise ConfigError("context", f"must be at least the {case.num_tokens} tokens of a forward, not {case.context}")
    before = [context - case.num_tokens for context in case.contexts]
    with _sequences(runner, case.contexts) as sequences:
        _fill(runner, sequences, before)
        count = case.num_tokens
        rows = [
            ForwardRow(sequence, _token_ids(runner, count, row=row), count) for row, sequence in enumerate(sequences, 1)
        ]
        yield (
            lambda: runner.forward_batch(RowBatch.of(rows), case.layers),
            lambda: _truncate(runner, sequences, before),
        )


def _device_seconds(work: Callable[[], object]) -> float:
    """Device time of one of several runs in a row; a run before them keeps the device busy meanwhile."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    work()
    began.record()
    for _ in range(_IN_A_ROW):
        work()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / _IN_A_ROW


def time_draft_loop(runner: ModelRunner, case: Case, *, num_samples: int, num_warmups: int) -> list[float]:
    """Seconds of a proposal of `case.num_tokens`, from one committed token to the last draft token, with what it was
    drawn from.
    """
    before = [case.context - 1] * case.batch_size
    with _sequences(runner, [case.context + case.num_tokens] * case.batch_size) as sequences:
        _fill(runner, sequences, before)
        last = _token_ids(runner, case.batch_size, row=2)
        return timed_samples(
            lambda: draft(runner, sequences, last, case.num_tokens, case.sampling),
            runner.device,
            num_samples=num_samples,
            num_warmups=num_warmups,
            undo=lambda: _truncate(runner, sequences, before),
        )


def draft(
    runner: ModelRunner,
    sequences: list[KVSequence],
    last: list[int],
    num_tokens: int,
    sampling: SamplingParams = GREEDY,
) -> list[list[int]]:
    """[num_tokens][B] tokens after each sequence's last."""
    request = Open(
        session=0,
        generation=0,
        sampling=sampling,
        seed=0,
        judging_rule=JudgingRule.GREEDY if sampling.temperature == 0 else JudgingRule.REJECTION,
        prompt_length=1,
        max_length=runner.max_model_len,
        num_token_ids=runner.config.vocab_size,
    )
    drafted = [last]
    if runner.drafting is not None:
        return _draft_in_loops(runner, request, sequences, last, num_tokens)
    for _ in range(num_tokens):
        pairs = zip(sequences, drafted[-1], strict=True)
        logits = runner.forward([ForwardRow(sequence, [token], 1) for sequence, token in pairs])
        rows = [LogitRow(SessionSampling(request), s.token_ids, s.length, s.length) for s in sequences]
        drafted.append([drawn.token_id for drawn in propose(logits, rows)])
    return drafted[1:]


def _draft_in_loops(
    runner: ModelRunner, request: Open, sequences: list[KVSequence], last: list[int], num_tokens: int
) -> list[list[int]]:
    """The same where the device draws: one launch for as many tokens as that takes."""
    metadata = DraftMetadata.of(request, runner.config.vocab_size)
    rows: list[list[int]] = [[token] for token in last]
    while (left := num_tokens + 1 - len(rows[0])) > 0:
        asked = [
            DraftRow(metadata, sequence, tokens[-1:], min(left, MAX_STEPS), sequence.length + 1)
            for sequence, tokens in zip(sequences, rows, strict=True)
        ]
        for tokens, draws in zip(rows, runner.draft(asked), strict=True):
            tokens.extend(draws.token_ids)
    return [[tokens[step] for tokens in rows] for step in range(1, num_tokens + 1)]


@contextmanager
def _sequences(runner: ModelRunner, max_lengths: list[int]) -> Iterator[list[KVSequence]]:
    """Sequences that are released at the end, whatever happens; `OutOfPagesError` when the cache is too small."""
    opened: list[KVSequence] = []
    try:
        for length in max_lengths:
            opened.append(runner.sequences.open(length))
        yield opened
    finally:
        for sequence in opened:
            runner.sequences.release(sequence)


def _fill(runner: ModelRunner, sequences: list[KVSequence], lengths: list[int]) -> None:
    """Prefill each sequence to its length with tokens of its own, several in one forward."""
    left = [(sequence, _token_ids(runner, length, row=row)) for row, (sequence, length) in
            enumerate(zip(sequences, lengths, strict=True)) if length]  # fmt: skip
    while left:
        rows, room = [], _FILLED_AT_ONCE
        for sequence, text in left:
            count = min(room, len(text) - sequence.length)
            if count:
                rows.append(ForwardRow(sequence, text[sequence.length : sequence.length + count], 0))
                room -= count
        runner.forward(rows)
        for row in rows:
            runner.sequences.commit(row.sequence, row.sequence.length)
        left = [(sequence, text) for sequence, text in left if sequence.length < len(text)]


def _truncate(runner: ModelRunner, sequences: list[KVSequence], lengths: list[int]) -> None:
    """Truncate sequences; recurrent layers replay and write with the next forward what they do in a decode step."""
    for sequence, length in zip(sequences, lengths, strict=True):
        runner.sequences.truncate(sequence, length)
    runner.sequences.set_states_back(sequences)


def _token_ids(runner: ModelRunner, count: int, *, row: int) -> list[int]:
    generator = torch.Generator().manual_seed(_SEED + row)
    found: list[int] = torch.randint(runner.config.vocab_size, (count,), generator=generator).tolist()
    return found
