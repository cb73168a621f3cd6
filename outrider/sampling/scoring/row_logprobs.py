"""Logprobs beside the scoring kernels: launched behind them over the same logits, and read when the forward has ended.

The candidate of a row is the token that the kernels find there: none other may be emitted.

Shape letters: ``R`` rows of all sessions, ``P`` rows of some of them, ``V`` vocabulary, ``N`` likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.batched import LogprobBatch, ragged
from outrider.kernels.device_stream import Mark, to_device, to_host
from outrider.sampling.logprobs import drawable_logprobs, likeliest, ranks_of
from outrider.sampling.session import SessionSampling

MOST_LOGPROB_ROWS = 256
"""Positions whose logprobs are computed together: with a vocabulary of 128,000 they take 128 MiB."""


@dataclass(frozen=True, slots=True)
class _LimitGroup:
    """Sessions with the same limit of ids and number of likeliest tokens."""

    indices: NDArray[np.intp]
    rows: NDArray[np.intp]  # [P]
    found: tuple[Tensor, ...]
    """Logprobs [P, 1] and ranks [P, 1] of the tokens, ids [P, N] and logprobs [P, N] of the likeliest, on the host."""


class RowLogprobs:
    """Logprobs of those sessions of a batch that ask for them, under way."""

    def __init__(
        self, logits: Tensor, tokens: Tensor, samplings: Sequence[SessionSampling], counts: NDArray[np.int64]
    ) -> None:
        """``logits`` [R, V] are the model's own, ``tokens`` [R] on the device; ``counts`` [B]: rows of each session."""
        self._counts = counts
        self._parts = [_launch(logits, tokens, counts, part, samplings[part[0]]) for part in _alike(samplings, counts)]
        self._mark = Mark(logits.device)

    def batched(self, token_ids: NDArray[np.int32]) -> LogprobBatch:
        """Wait for them; ``token_ids`` [R] are ``tokens``, on the host."""
        self._mark.wait()
        parts = [_arrays(part, token_ids, self._counts) for part in self._parts]
        indices = np.concatenate([part.indices for part in self._parts])
        others = np.setdiff1d(np.arange(len(self._counts)), indices)
        order = np.concatenate((indices, others)).argsort()
        return LogprobBatch.joined([*parts, LogprobBatch.nothing(len(others))]).selected(order)


def _alike(samplings: Sequence[SessionSampling], counts: NDArray[np.int64]) -> Iterator[list[int]]:
    """Sessions with logprobs whose rows may be computed together."""
    groups: dict[object, list[int]] = {}
    for place, sampling in enumerate(samplings):
        if (num_top := sampling.open.num_logprobs) is not None:
            groups.setdefault((sampling.open.num_token_ids, num_top), []).append(place)
    for group in groups.values():
        part, num_rows = list[int](), 0
        for place in group:
            if part and num_rows + counts[place] > MOST_LOGPROB_ROWS:
                yield part
                part, num_rows = [], 0
            part.append(place)
            num_rows += int(counts[place])
        yield part


@torch.inference_mode()
def _launch(
    logits: Tensor, tokens: Tensor, counts: NDArray[np.int64], part: list[int], sampling: SessionSampling
) -> _LimitGroup:
    indices = np.array(part, dtype=np.intp)
    rows = ragged(counts, indices)
    if len(rows) < len(logits):
        chosen = to_device(rows.astype(np.int32), logits.device)
        logits, tokens = logits.index_select(0, chosen), tokens.index_select(0, chosen)
    logprobs = drawable_logprobs(logits.float(), sampling.open.num_token_ids)
    values = logprobs.gather(-1, tokens.clamp(min=0).to(torch.int64).unsqueeze(-1))
    top_values, top_ids = likeliest(logprobs, sampling.open.num_logprobs or 0)
    found = values, ranks_of(logprobs, values).to(torch.int32), top_ids.to(torch.int32), top_values
    return _LimitGroup(indices, rows, tuple(map(to_host, found)))


def _arrays(part: _LimitGroup, token_ids: NDArray[np.int32], counts: NDArray[np.int64]) -> LogprobBatch:
    values, ranks, top_ids, top_values = [each.numpy() for each in part.found]
    can_be_drawn = top_values > -np.inf
    return LogprobBatch(
        counts[part.indices].astype(np.uint32),
        np.ones(len(part.rows), dtype=np.uint32),
        token_ids[part.rows],
        values.ravel().copy(),
        ranks.ravel().copy(),
        can_be_drawn.sum(axis=-1, dtype=np.uint32),
        top_ids[can_be_drawn],
        top_values[can_be_drawn],
    )
