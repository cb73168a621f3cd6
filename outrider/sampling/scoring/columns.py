"""Scoring of steps with drafts from arrays: the K+1 positions of each of many sessions, all tokens or all sparse.

Sessions that kernels cannot score from the model's own logits, and all sessions on a CPU, are scored as single
requests; so is a step of which a row is unsound.

Shape letters: ``B`` sessions, ``R`` rows, K+1 of each; ``T`` draft tokens of all of them, ``M`` ids of all supports,
``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.columns import ScoreColumns
from outrider.errors import IntegrityError
from outrider.kernels.launching import has_kernels
from outrider.kernels.scoring import Findings, Found, Launch, Words, launch
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.scoring.fused import Scoring
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.sampling.scoring.session_rows import Ints, SessionRows, are_sound
from outrider.sampling.session import SessionSampling
from outrider.types import JudgingRule, SparseScores


@dataclass(frozen=True, slots=True)
class ScoringStep:
    """What is to be scored: ids and supports that keep the contract of single requests."""

    samplings: Sequence[SessionSampling]  # [B]
    texts: Sequence[Sequence[int]]
    """At least the first ``bases`` tokens of each session."""
    bases: Ints  # [B] committed tokens
    lengths: Ints  # [B] draft tokens
    columns: ScoreColumns
    rows: SessionRows | None
    """None: one of the sessions may not be rows."""

    @property
    def is_sparse(self) -> bool:
        """Whether scores are about supports: of all sessions, or of none."""
        return self.samplings[0].metadata.rule is JudgingRule.REJECTION

    @property
    def supports(self) -> tuple[Words, Words] | None:
        """Ids in the support of each draft token [T], and the ids [M]."""
        counts, ids = self.columns.support_counts, self.columns.support_token_ids
        return None if counts is None or ids is None or not self.is_sparse else (counts, ids)

    def requests(self) -> list[ScoreRequest]:
        """As single requests."""
        drafts, ends = self.columns.draft_token_ids.tolist(), self.lengths.cumsum().tolist()
        heads = zip(self.samplings, self.texts, self.bases.tolist(), strict=True)
        spans = zip((self.lengths.cumsum() - self.lengths).tolist(), ends, strict=True)
        return [
            ScoreRequest(*head, drafts[start:stop], support)
            for head, (start, stop), support in zip(heads, spans, self.columns.supports(), strict=True)
        ]


class ColumnsScoring:
    """Scoring of a step, under way."""

    def __init__(self, logits: Tensor, step: ScoringStep) -> None:  # [R, V]
        if len(logits) != (num_rows := int(step.lengths.sum()) + len(step.lengths)):
            raise IntegrityError(f"{len(logits)} rows of logits for {num_rows} positions to score")
        self._logits, self._step = logits, step
        self._launch: Launch | None = None
        self._singles: Scoring | None = None
        if step.rows is not None and has_kernels(logits.device):
            self._launch = launch(logits, step.rows.with_drafts(step.bases, step.lengths, step.supports))
        else:
            self._singles = self._score_singly()

    def tokens(self) -> NDArray[np.int32] | None:
        """Wait for the kernels; the tokens of all rows, [R]. None: scores are sparse, or ``outcomes`` tells."""
        rows, findings = self._step.rows, None if self._step.is_sparse else self._findings()
        if rows is None or findings is None:
            return None
        if rows.column is not None:
            places: slice | Ints = slice(rows.column * findings.num_rows, (rows.column + 1) * findings.num_rows)
        else:
            places = rows.found.repeat(self._step.lengths + 1) * findings.num_rows + np.arange(findings.num_rows)
        tokens: NDArray[np.int32] = findings.words[places]
        return tokens.copy()

    def sparse(self) -> SparseScores | None:
        """Wait for the kernels; the scores of all sessions, one after the other. None: scores are tokens, or
        ``outcomes`` tells.
        """
        if not self._step.is_sparse or (findings := self._findings()) is None:
            return None
        probs, masses = findings.support_probs.copy(), findings.of(Found.MASS).copy()
        return SparseScores(probs, masses, findings.of(Found.OUTSIDE).copy())

    @torch.inference_mode()
    def outcomes(self) -> list[ScoreOutcome]:
        """Wait for the kernels; session by session. Call once."""
        singles = self._score_singly() if self._singles is None else self._singles
        return singles.outcomes()

    def _findings(self) -> Findings | None:
        """What the kernels found, if nothing is wrong with any row."""
        rows = self._step.rows
        if self._launch is None or rows is None:
            return None
        findings = self._launch.findings()
        return findings if are_sound(findings, rows.bound) else None

    def _score_singly(self) -> Scoring:
        fused = has_kernels(self._logits.device)
        return Scoring(self._logits, self._step.requests(), fused=fused, launched=self._launch)


@torch.inference_mode()
def begin_columns(logits: Tensor, step: ScoringStep) -> ColumnsScoring:
    """Start to score the K+1 positions of each session of a step over ``logits`` [R, V] of any floating type."""
    return ColumnsScoring(logits, step)
