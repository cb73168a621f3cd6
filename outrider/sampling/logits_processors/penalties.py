"""Repetition, frequency and presence penalties.

Repetition looks at prompt and output, the other two at the output alone; draft tokens before a position are output to
it. Order and meaning are vLLM's.

Shape letters: ``M`` rows with a penalty, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.sampling.logits_processors.workspace import Workspace
from outrider.sampling.parameters import has_penalties
from outrider.sampling.rows import LogitRow, SessionSpan

Counts = NDArray[np.float32]


def apply_penalties(workspace: Workspace, spans: Sequence[SessionSpan]) -> None:
    """Apply the penalties of the rows that have any."""
    wanted = [span for span in spans if has_penalties(span.open.sampling)]
    if not wanted:
        return
    rows = [row for span in wanted for row in span.rows]
    device = workspace.logits.device
    output = torch.from_numpy(_output_counts(wanted, workspace.vocab_size)).to(device)
    prompt = torch.from_numpy(_prompt_counts(wanted, workspace.vocab_size)).to(device)
    samplings = [row.open.sampling for row in rows]
    repetition = workspace.column([sampling.repetition_penalty for sampling in samplings])
    frequency = workspace.column([sampling.frequency_penalty for sampling in samplings])
    presence = workspace.column([sampling.presence_penalty for sampling in samplings])

    def penalised(logits: Tensor) -> Tensor:  # [M, V]
        factor = torch.where((prompt + output) > 0, repetition, 1.0)
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        return repeated - frequency * output - presence * (output > 0)

    workspace.replace([index for span in wanted for index in span.indices], penalised)


def _output_counts(spans: Sequence[SessionSpan], vocab_size: int) -> Counts:  # [M, V]
    """Number of occurrences of each token in the output before each row."""
    return np.concatenate([_span_counts(span.rows, vocab_size) for span in spans])


def _span_counts(rows: Sequence[LogitRow], vocab_size: int) -> Counts:
    """Counts of successive rows of one text, where only the tokens between two rows are counted again."""
    counts = np.zeros((len(rows), vocab_size), dtype=np.float32)
    previous: LogitRow | None = None
    for i, row in enumerate(rows):
        start = row.open.prompt_length
        if previous is not None and previous.tokens is row.tokens and start <= previous.length <= row.length:
            counts[i] = counts[i - 1]
            start = previous.length
        counts[i] += _count(row.tokens[start : row.length], vocab_size)
        previous = row
    return counts


def _prompt_counts(spans: Sequence[SessionSpan], vocab_size: int) -> Counts:  # [M, V]
    """Number of occurrences of each token in the prompt of each row; zeros without a repetition penalty."""
    counts = np.zeros((sum(len(span.rows) for span in spans), vocab_size), dtype=np.float32)
    start = 0
    for span in spans:
        stop = start + len(span.rows)
        if span.open.sampling.repetition_penalty != 1:
            counts[start:stop] = _count(span.rows[0].tokens[: span.open.prompt_length], vocab_size)
        start = stop
    return counts


def _count(token_ids: Sequence[int], vocab_size: int) -> Counts:  # [V]
    ids = np.asarray(token_ids, dtype=np.int64)
    known = ids[(ids >= 0) & (ids < vocab_size)]
    return np.bincount(known, minlength=vocab_size).astype(np.float32)
