"""Logprobs and ranks of the tokens that may be emitted, and of the most likely tokens.

Computed only for requests with logprobs. A rank is 1 plus the number of strictly more likely tokens among the ids that
can be drawn. Padding ids of the vocabulary have no rank and are never among the most likely; they do count in the
normalisation, which is the model's own.

Shape letters: ``R`` positions, ``V`` vocabulary, ``C`` candidates of a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.ordering import ascending, largest
from outrider.ports import Open
from outrider.sampling.softmax import log_softmax_rows
from outrider.types import CandidateLogprobs, FloatArray, IntArray

_FEW_CANDIDATES = 4
"""Number of candidates of a position up to which counting more likely tokens is faster than sorting."""


def drawable_logprobs(logits: Tensor, num_token_ids: int) -> Tensor:  # [R, V] -> [R, V]
    """Logprobs, with ids from ``num_token_ids`` on at -inf; 0 means no such limit."""
    logprobs = log_softmax_rows(logits)
    if 0 < num_token_ids < logits.shape[-1]:
        logprobs[:, num_token_ids:] = float("-inf")
    return logprobs


def position_logprobs(
    logprobs: Tensor,  # [R, V]
    candidates: Sequence[Sequence[int]],  # R lists of distinct ids
    num_top: int,
) -> tuple[CandidateLogprobs, ...]:
    """Logprobs and ranks of each position's candidates, and its ``num_top`` most likely tokens."""
    of_candidates = _of_candidates(logprobs, candidates)
    tops = _likeliest_of_each(logprobs, num_top)
    return tuple(CandidateLogprobs(*own, *top) for own, top in zip(of_candidates, tops, strict=True))


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor,  # [T, V] float32
    token_ids: Sequence[int],  # [T] the prompt token that each row predicts
    open_: Open,
) -> tuple[CandidateLogprobs, ...]:
    """Logprobs of prompt tokens, from the model's unprocessed distribution."""
    logprobs = drawable_logprobs(logits, open_.num_token_ids)
    return position_logprobs(logprobs, [(token_id,) for token_id in token_ids], open_.num_prompt_logprobs or 0)


def _of_candidates(
    logprobs: Tensor, candidates: Sequence[Sequence[int]]
) -> list[tuple[IntArray, FloatArray, IntArray]]:
    """Ids, logprobs and ranks of each position's candidates."""
    ids = [np.asarray(position, dtype=np.int32) for position in candidates]
    width = max((len(position) for position in ids), default=0)
    if width == 0:
        return [(position, np.zeros(0, np.float32), np.zeros(0, np.int32)) for position in ids]
    padded = np.zeros((len(ids), width), dtype=np.int64)
    for row, position in zip(padded, ids, strict=True):
        row[: len(position)] = position
    values = logprobs.gather(-1, torch.from_numpy(padded).to(logprobs.device))  # [R, C]
    ranks = ranks_of(logprobs, values).to(torch.int32).cpu().numpy()
    of_ids = values.float().cpu().numpy()
    return [
        (position, of_ids[row, : len(position)].copy(), ranks[row, : len(position)].copy())
        for row, position in enumerate(ids)
    ]


def ranks_of(logprobs: Tensor, values: Tensor) -> Tensor:  # [R, V], [R, C] -> [R, C] int64
    """The rank of each value in its row."""
    if values.shape[-1] <= _FEW_CANDIDATES:
        likelier = [(logprobs > values[:, i : i + 1]).sum(-1) for i in range(values.shape[-1])]
        return torch.stack(likelier, dim=-1) + 1
    below_or_equal = torch.searchsorted(ascending(logprobs), values.contiguous(), right=True)
    return logprobs.shape[-1] - below_or_equal + 1


def likeliest(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:  # [R, V] -> [R, N] float32, int64
    """The logprobs and ids of the ``num_top`` likeliest, best first, equals by lowest id."""
    if num_top <= 0:
        return logprobs[:, :0], torch.zeros(len(logprobs), 0, dtype=torch.int64, device=logprobs.device)
    return largest(logprobs, min(num_top, logprobs.shape[-1]))


def _likeliest_of_each(logprobs: Tensor, num_top: int) -> list[tuple[IntArray, FloatArray]]:
    """Ids and logprobs of the likeliest; tokens that cannot be drawn are left out."""
    values, token_ids = likeliest(logprobs, num_top)
    ids, of_ids = token_ids.to(torch.int32).cpu().numpy(), values.float().cpu().numpy()
    rows = zip(ids, of_ids, strict=True)
    if (of_ids > -np.inf).all():
        return list(rows)
    return [(own[of_own > -np.inf], of_own[of_own > -np.inf]) for own, of_own in rows]
