"""Draft sampling: one token for each row, with the distribution that it was drawn from as evidence.

The Gumbel argmax runs over the logarithms of the reported probabilities, so the evidence is exact.

Shape letters: ``N`` rows, ``V`` vocabulary, ``S`` tokens of a support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.errors import OutriderError
from outrider.randomness.streams import Stream
from outrider.sampling.checks import row_errors
from outrider.sampling.draws import gumbel_argmax, gumbel_argmax_among, stream_rows
from outrider.sampling.logits_processors.process import process_logits
from outrider.sampling.parameters import is_coupled, is_greedy
from outrider.sampling.rows import LogitRow
from outrider.sampling.softmax import softmax_rows
from outrider.sampling.support import DEFAULT_RULES, DraftingRules, choose_support
from outrider.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Drawn:
    """Drawn token of one row, with at most one form of evidence; none if the judging rule needs none."""

    token_id: int
    """-1 if ``error`` is set."""
    support_ids: IntArray | None = None  # [S] best first
    support_probs: FloatArray | None = None  # [S] sums to 1
    error: OutriderError | None = None


@torch.inference_mode()
def propose(
    logits: Tensor,  # [N, V] float32
    rows: Sequence[LogitRow],
    rules: DraftingRules = DEFAULT_RULES,
) -> list[Drawn]:
    """Draw one token for each row, by the rule of the row's request.

    Greedy takes the most likely, coupled adds the shared noise to the processed logits. Otherwise the token comes from
    the smallest set of likeliest tokens with at least ``support_mass``, ``support_limit`` of them at most, scaled to 1;
    or, with ``takes_argmax``, it is the most likely one, and certain.
    """
    processed = process_logits(logits, rows)
    best, best_ids = processed.max(-1)
    errors = row_errors(logits, best)
    greedy_ids: list[int] = best_ids.tolist()
    drawn = [Drawn(token_id) for token_id in greedy_ids]
    coupled = [i for i, row in enumerate(rows) if is_coupled(row.open)]
    sparse = [i for i, row in enumerate(rows) if _is_drawn(row)]
    _put(drawn, coupled, _draw_coupled(*_choose(processed, rows, coupled)) if coupled else [])
    if rules.takes_argmax:
        for place in sparse:
            drawn[place] = _certain(greedy_ids[place], rows[place])
    elif sparse:
        _put(drawn, sparse, _draw_sparse(*_choose(processed, rows, sparse), rules))
    return [one if error is None else Drawn(-1, error=error) for one, error in zip(drawn, errors, strict=True)]


def _certain(token_id: int, row: LogitRow) -> Drawn:
    """The most likely token, with all probability on it."""
    if not row.open.judging_rule.needs_evidence:
        return Drawn(token_id)
    return Drawn(token_id, np.array([token_id], dtype=np.int32), np.ones(1, dtype=np.float32))


def _is_drawn(row: LogitRow) -> bool:
    return not is_greedy(row.open) and not is_coupled(row.open)


def _choose(logits: Tensor, rows: Sequence[LogitRow], chosen: Sequence[int]) -> tuple[Tensor, Sequence[LogitRow]]:
    if len(chosen) == len(rows):
        return logits, rows
    index = torch.tensor(chosen, device=logits.device)
    return logits[index], [rows[i] for i in chosen]


def _put(drawn: list[Drawn], indices: Sequence[int], values: Sequence[Drawn]) -> None:
    for place, value in zip(indices, values, strict=True):
        drawn[place] = value


def _draw_coupled(logits: Tensor, rows: Sequence[LogitRow]) -> list[Drawn]:  # [N, V]
    winners = gumbel_argmax(logits, stream_rows(rows, Stream.COUPLED, logits.device))
    return [Drawn(token_id) for token_id in winners.tolist()]


def _draw_sparse(logits: Tensor, rows: Sequence[LogitRow], rules: DraftingRules) -> list[Drawn]:  # [N, V]
    vocab_size = logits.shape[-1]
    probs, token_ids, widths = choose_support(softmax_rows(logits), rules.support_mass, rules.support_limit)
    noise = stream_rows(rows, Stream.PROPOSAL, logits.device)
    winners: list[int] = gumbel_argmax_among(probs.log(), token_ids, noise, vocab_size).tolist()
    reported_ids, reported_probs = token_ids.to(torch.int32).cpu().numpy(), probs.cpu().numpy()
    return [
        Drawn(winner, reported_ids[i, :width].copy(), reported_probs[i, :width].copy())
        if rows[i].open.judging_rule.needs_evidence
        else Drawn(winner)
        for i, (winner, width) in enumerate(zip(winners, widths, strict=True))
    ]
