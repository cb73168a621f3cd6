"""Scoring of rows of the running batch from arrays: the K+1 positions of each of many sessions, or the one position of
each session in a decode step.

Sessions that kernels cannot score from the model's own logits, and all sessions on a CPU, are scored as single
requests; so is a batch of which a row is unsound.

Shape letters: ``B`` sessions, ``R`` rows, K+1 of each; ``T`` draft tokens of all of them, ``M`` ids of all supports,
``V`` vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.batched import LogprobBatch, ScoreBatch
from outrider.errors import IntegrityError, OutriderError
from outrider.kernels.device_stream import to_device
from outrider.kernels.launching import has_kernels
from outrider.kernels.scoring import Findings, Found, Launch, Words, launch
from outrider.sampling.logits_processors.grammar_masks import masked_rows, masks_of
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.scoring.fused import Scoring
from outrider.sampling.scoring.row_logprobs import RowLogprobs
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.sampling.scoring.session_rows import Ints, SessionRows, are_sound
from outrider.sampling.session import SessionSampling
from outrider.structured_output import PositionMasks
from outrider.types import JudgingRule, SparseScores, TokenScores


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Input of a scoring: ids and supports that keep the contract of single requests."""

    samplings: Sequence[SessionSampling]  # [B]
    texts: Sequence[Sequence[int]]
    """Token ids, at least the first ``bases`` tokens of each session."""
    bases: Ints  # [B] committed tokens
    lengths: Ints  # [B] draft tokens
    batched: ScoreBatch | None
    """Draft tokens and supports; None: there are none."""
    rows: SessionRows | None
    """None: one of the sessions may not be rows."""
    masks: Mapping[int, PositionMasks] = field(default_factory=dict)
    """Masks of sessions with a grammar, by their indices, once they are begun; otherwise made when they are needed."""

    @property
    def is_sparse(self) -> bool:
        """True if scores of drafts are about supports: of all sessions, or of none."""
        return self.samplings[0].metadata.rule is JudgingRule.REJECTION

    @property
    def supports(self) -> tuple[Words, Words] | None:
        """Ids in the support of each draft token [T], and the ids [M]."""
        if self.batched is None or not self.is_sparse:
            return None
        counts, ids = self.batched.support_counts, self.batched.support_token_ids
        return None if counts is None or ids is None else (counts, ids)

    def requests(self) -> list[ScoreRequest]:
        """Rows as single requests."""
        requests = self._unmasked_requests()
        for place, masks in self.masks.items():
            requests[place].masks = masks
        return requests

    def _unmasked_requests(self) -> list[ScoreRequest]:
        heads = zip(self.samplings, self.texts, self.bases.tolist(), strict=True)
        if self.batched is None:
            return [ScoreRequest(*head) for head in heads]
        drafts, ends = self.batched.draft_token_ids.tolist(), self.lengths.cumsum().tolist()
        spans = zip((self.lengths.cumsum() - self.lengths).tolist(), ends, strict=True)
        return [
            ScoreRequest(*head, drafts[start:stop], support)
            for head, (start, stop), support in zip(heads, spans, self.batched.supports(), strict=True)
        ]

    @property
    def has_logprobs(self) -> bool:
        """True if a session asks for logprobs."""
        return any(sampling.open.num_logprobs is not None for sampling in self.samplings)

    @property
    def has_more_candidates(self) -> bool:
        """True if logprobs are asked for, of positions where other tokens may be emitted than the one found there."""
        return self.has_logprobs and self.supports is not None

    @property
    def has_grammars(self) -> bool:
        """True if a session has a grammar."""
        return any(sampling.has_grammar for sampling in self.samplings)

    def masked(self, logits: Tensor) -> Tensor:  # [R, V]
        """Logits of which grammars mask some: the given ones, changed, or float32 ones. Waits for the masks."""
        starts = ((self.lengths + 1).cumsum() - self.lengths - 1).tolist()
        masks = self.masks
        if not masks:
            requests = self.requests()
            masks = {i: masks_of(requests[i]) for i, sampling in enumerate(self.samplings) if sampling.has_grammar}
        return masked_rows(logits, [starts[place] for place in masks], list(masks.values()))

    def launch(self, logits: Tensor) -> Launch | None:
        """Kernels over all rows; None where there are none for these sessions."""
        if self.rows is None or not has_kernels(logits.device):
            return None
        if self.batched is None:
            return launch(logits, self.rows.at(self.bases))
        return launch(logits, self.rows.with_drafts(self.bases, self.lengths, self.supports))


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Next token of each text, where there are no drafts."""

    token_ids: Ints  # [B] -1 where nothing can be drawn
    masses: NDArray[np.float32]  # [B] of ``SparseScores``; without meaning for others
    drawn: Ints  # [B] what ``RowScoring.drawn`` has
    errors: Mapping[int, OutriderError]
    """Errors of the sessions that fail, by their indices."""
    logprobs: LogprobBatch | None = None

    @classmethod
    def of(cls, outcomes: Sequence[ScoreOutcome], drawn: Ints | None) -> NextTokens:
        """Tokens of sessions that were scored one by one."""
        found = [_token_of(outcome) for outcome in outcomes]
        tokens = np.array([token_id for token_id, _ in found], dtype=np.int64)
        masses = np.array([mass for _, mass in found], dtype=np.float32)
        errors = {place: outcome.error for place, outcome in enumerate(outcomes) if outcome.error is not None}
        logprobs = LogprobBatch.of([outcome.logprobs for outcome in outcomes])
        return cls(tokens, masses, tokens if drawn is None else drawn, errors, logprobs)


class RowScoring:
    """Scoring under way. Masks of grammars are waited for by whatever asks first for a result: ``drawn`` too."""

    def __init__(self, logits: Tensor, scored: ScoredRows) -> None:  # [R, V]
        if len(logits) != (num_rows := int(scored.lengths.sum()) + len(scored.lengths)):
            raise IntegrityError(f"{len(logits)} rows of logits for {num_rows} positions to score")
        self._logits, self._scored = logits, scored
        self._has_kernels = scored.rows is not None and has_kernels(logits.device) and not scored.has_more_candidates
        self._is_masked = scored.has_grammars
        self._logprobs: RowLogprobs | None = None
        if not self._is_masked:
            self._launch if self._has_kernels else self._singles  # noqa: B018 - the kernels start

    @functools.cached_property
    def _launch(self) -> Launch | None:
        if not self._has_kernels:
            return None
        if self._is_masked:
            self._logits = self._scored.masked(self._logits)
        launched = self._scored.launch(self._logits)
        if launched is not None and self._scored.has_logprobs:
            tokens = self._tokens_of(launched)
            self._logprobs = RowLogprobs(self._logits, tokens, self._scored.samplings, self._scored.lengths + 1)
        return launched

    @functools.cached_property
    def _singles(self) -> Scoring:
        """Session by session. Masked rows, and those with logprobs, are launched anew."""
        is_anew = self._is_masked or self._scored.has_logprobs
        return self._score_singly(None if is_anew else self._launch)

    def launch(self) -> bool:
        """Launch the kernels, for which the masks of grammars have to be made; False without kernels."""
        return self._launch is not None

    def drawn(self) -> Tensor | None:
        """Token of each row, [R] int32 on the device; any number for an unsound row. None without kernels."""
        return None if self._launch is None else self._tokens_of(self._launch)

    def _tokens_of(self, launched: Launch) -> Tensor:  # [R]
        words, indices = launched.on_device, self._token_indices()
        return words[indices] if isinstance(indices, slice) else words.index_select(0, to_device(indices, words.device))

    def logprobs(self) -> LogprobBatch | None:
        """Logprobs of the sessions that ask for them, after ``tokens`` or ``sparse``; None if none does."""
        if self._logprobs is None or self._launch is None:
            return None
        return self._logprobs.batched(self._launch.findings().words[self._token_indices()])

    def tokens(self) -> NDArray[np.int32] | None:
        """Wait for the kernels; the tokens of all rows, [R]. None: scores are sparse, or ``outcomes`` tells."""
        if self._scored.is_sparse or (findings := self._findings()) is None:
            return None
        tokens: NDArray[np.int32] = findings.words[self._token_indices()]
        return tokens.copy()

    def sparse(self) -> SparseScores | None:
        """Wait for the kernels; the scores of all sessions, one after the other. None: scores are tokens, or
        ``outcomes`` tells.
        """
        if not self._scored.is_sparse or (findings := self._findings()) is None:
            return None
        probs, masses = findings.support_probs.copy(), findings.of(Found.MASS).copy()
        return SparseScores(probs, masses, findings.of(Found.OUTSIDE).copy())

    def next_tokens(self) -> NextTokens:
        """Wait for the kernels; what follows each text of a decode step. Call once."""
        if self._launch is None:
            return NextTokens.of(self.outcomes(), None)
        drawn = self._launch.findings().words[self._token_indices()].astype(np.int64)
        if (findings := self._findings()) is None:
            return NextTokens.of(self.outcomes(), drawn)
        return NextTokens(drawn, findings.of(Found.MASS).copy(), drawn, {}, self.logprobs())

    @torch.inference_mode()
    def outcomes(self) -> list[ScoreOutcome]:
        """Wait for the kernels; session by session. Call once."""
        return self._with_failures(self._singles.outcomes())

    def _with_failures(self, outcomes: list[ScoreOutcome]) -> list[ScoreOutcome]:
        """A grammar that cannot be followed leaves no token; say why."""
        for place, masks in self._scored.masks.items():
            if masks.error is not None:
                outcomes[place] = ScoreOutcome(None, error=masks.error)
        return outcomes

    def _findings(self) -> Findings | None:
        """Results of the kernels, if nothing is wrong with any row."""
        rows = self._scored.rows
        if self._launch is None or rows is None:
            return None
        findings = self._launch.findings()
        return findings if are_sound(findings, rows.bound) else None

    def _token_indices(self) -> slice | Words:
        """Indices of each row's token among the words that the kernels find."""
        rows, count = self._scored.rows, len(self._logits)
        if rows is None:
            raise ValueError("kernels have no rows of these sessions")
        if rows.column is not None:
            return slice(rows.column * count, (rows.column + 1) * count)
        found = rows.found.repeat(self._scored.lengths + 1) * count + np.arange(count)
        indices: Words = found.astype(np.int32)
        return indices

    def _score_singly(self, launched: Launch | None) -> Scoring:
        fused = has_kernels(self._logits.device)
        return Scoring(self._logits, self._scored.requests(), fused=fused, launched=launched)


def _token_of(outcome: ScoreOutcome) -> tuple[int, float]:
    """The token that follows and its mass."""
    form = outcome.form
    if isinstance(form, TokenScores):
        return form.token_ids[0], math.nan
    if isinstance(form, SparseScores):
        return int(form.outside_token_ids[0]), float(form.outside_mass[0])
    return -1, math.nan
