"""Results of a draft loop, read on the host.

Owns the meaning of the records.

Shape letters: ``B`` rows, ``K`` steps, ``R`` rows of the launch, ``S`` the most tokens of a support, ``T`` draft tokens
of all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import IntegrityError, OutriderError
from outrider.kernels.draft_sampling.layout import NUM_RUNNERS_UP, Field
from outrider.model_executor.draft_loop.batched import DraftBatch
from outrider.model_executor.draft_loop.rows import DraftRow
from outrider.sampling.checks import row_error
from outrider.types import Evidence, SparseEvidence

Numbers = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Draws:
    """Draft tokens and evidence of one row."""

    token_ids: tuple[int, ...]
    """Drawn tokens in order."""
    evidence: Evidence = None
    """Distributions that they were drawn from, where the rule needs them and there are any."""
    error: OutriderError | None = None
    """Error that ended the draws early, if they are fewer than requested."""


class RunnersUp(NamedTuple):
    """Tokens that came next to each draft token of a row, best first; -1 ends the list of one."""

    token_ids: Numbers  # [K, NUM_RUNNERS_UP]
    gaps: NDArray[np.float32]  # [K, NUM_RUNNERS_UP]
    """Distance of each below the drawn token."""


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """Draft tokens and evidence of rows that drew all that they were to draw."""

    counts: Sequence[int]  # [B] draft tokens of each
    token_ids: Numbers  # [T]
    supports: SparseEvidence | None
    """The evidence of all, one draft token after the other."""
    records: Numbers | None = None  # [B, K, NUM_FIELDS] valid until the next loop

    def runners_up(self) -> list[RunnersUp]:
        """Tokens that came next to each draft token of each row."""
        if self.records is None:
            return []
        named = self.records[:, :, Field.RUNNER_UP :].copy()
        ids, gaps = named[..., :NUM_RUNNERS_UP], named[..., NUM_RUNNERS_UP:].view(np.float32)
        return [RunnersUp(ids[row, :count], gaps[row, :count]) for row, count in enumerate(self.counts)]

    def after(self, num_rows: int) -> DrawnBatch:
        """All but the first rows, which have no evidence."""
        if not num_rows:
            return self
        return DrawnBatch(self.counts[num_rows:], self.token_ids[sum(self.counts[:num_rows]) :], None)

    def texts(self) -> list[list[int]]:
        """The draft tokens of each row."""
        ids, ends = self.token_ids.tolist(), itertools.accumulate(self.counts)
        return [ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)]


def read_batch(
    batched: DraftBatch,
    records: Numbers,  # [K, R, NUM_FIELDS]
    supports: Numbers | None,  # [K, R, 2, S]; None: no row needs evidence
) -> DrawnBatch | None:
    """Results of ``read_draws`` for the same rows, whose evidence is of one form; None where a row lacks a draw."""
    lengths, num_steps, num_rows = batched.num_drafts, len(records), len(batched.sequences)
    of_rows = records[:, :num_rows].transpose(1, 0, 2)  # [B, K, NUM_FIELDS]
    tokens, widths = of_rows[:, :, Field.TOKEN], of_rows[:, :, Field.WIDTH]
    is_drawn = None if min(lengths) == num_steps else np.arange(num_steps) < np.array(lengths)[:, None]  # [B, K]
    token_ids = tokens.flatten() if is_drawn is None else tokens[is_drawn]
    if min(token_ids.tolist()) < 0:
        return None
    if batched.metadata.is_certain:
        ones = np.ones(len(token_ids), dtype=np.int32)
        return DrawnBatch(lengths, token_ids, SparseEvidence(ones, token_ids, ones.astype(np.float32)), of_rows)
    if supports is None:
        return DrawnBatch(lengths, token_ids, None, of_rows)
    counts = widths.flatten() if is_drawn is None else widths[is_drawn]
    widest = max(counts.tolist())
    is_in = np.arange(widest) < widths[:, :, None]  # [B, K, W]
    if is_drawn is not None:
        is_in &= is_drawn[:, :, None]
    ids, probs = supports[:, :num_rows, :, :widest].transpose(2, 1, 0, 3)[:, is_in]
    return DrawnBatch(lengths, token_ids, SparseEvidence(counts, ids, probs.view(np.float32)), of_rows)


def read_draws(
    rows: Sequence[DraftRow],
    records: Numbers,  # [K, R, NUM_FIELDS]
    supports: Numbers | None,  # [K, R, 2, S]; None: no row needs evidence
) -> list[Draws]:
    """Each row's draws, as far as they could be made."""
    tokens = records[:, : len(rows), Field.TOKEN].T.tolist()
    texts = [_sound(ids[: row.num_drafts]) for row, ids in zip(rows, tokens, strict=True)]
    evidence: Sequence[Evidence] = (
        [None] * len(rows) if supports is None else _read_evidence(rows, texts, records, supports)
    )
    return [
        Draws(
            ids, _certain(row, ids) or evidence[i], _error(records[len(ids), i]) if len(ids) < row.num_drafts else None
        )
        for i, (row, ids) in enumerate(zip(rows, texts, strict=True))
    ]


def _certain(row: DraftRow, token_ids: tuple[int, ...]) -> SparseEvidence | None:
    if not token_ids or not row.metadata.is_certain:
        return None
    ones = np.ones(len(token_ids), dtype=np.int32)
    return SparseEvidence(ones, np.array(token_ids, dtype=np.int32), ones.astype(np.float32))


def _sound(token_ids: list[int]) -> tuple[int, ...]:
    """Tokens before the first that could not be drawn."""
    return tuple(token_ids if min(token_ids) >= 0 else itertools.takewhile(lambda token_id: token_id >= 0, token_ids))


def _read_evidence(
    rows: Sequence[DraftRow], texts: Sequence[tuple[int, ...]], records: Numbers, supports: Numbers
) -> list[SparseEvidence | None]:
    """Evidence of each row, in one copy, so that it outlives the memory that the device writes to."""
    counts = records[:, : len(rows), Field.WIDTH].T.copy()  # [B, K]
    widths = [
        own[: len(ids)] if row.metadata.needs_evidence else []
        for row, ids, own in zip(rows, texts, counts.tolist(), strict=True)
    ]
    parts = [supports[step, i, :, :width] for i, own in enumerate(widths) for step, width in enumerate(own)]
    joined = np.concatenate(parts, axis=1) if parts else supports[0, 0, :, :0]  # [2, any]
    ids, probs = joined[0], joined[1].view(np.float32)
    found: list[SparseEvidence | None] = []
    start = 0
    for i, own in enumerate(widths):
        stop = start + sum(own)
        found.append(SparseEvidence(counts[i, : len(own)], ids[start:stop], probs[start:stop]) if own else None)
        start = stop
    return found


def _error(record: Numbers) -> OutriderError:  # [NUM_FIELDS]
    largest = float(record[Field.LARGEST].view(np.float32))
    error = row_error(finite=bool(record[Field.IS_FINITE]), largest=largest)
    return error or IntegrityError(f"a draft loop drew nothing from logits whose largest is {largest}")
