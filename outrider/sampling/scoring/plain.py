"""Scoring of plain rows: one position of each of many sessions, from arrays that were made once.

What kernels are told of a session does not change between its steps but for two numbers, so the rows of a batch are an
array of which two columns are filled in. Without kernels, as on a CPU, sessions are scored one by one.

Shape letters: ``B`` sessions, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import OutriderError
from outrider.kernels.device_stream import to_device
from outrider.kernels.launching import has_kernels
from outrider.kernels.scoring import NO_IDS, Column, Found, Launch, Rows, Words, launch, place
from outrider.sampling.metadata import SamplingMetadata
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.scoring.fused import LOWEST_DRAWABLE, Scoring, drawn_column
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.sampling.session import SessionSampling
from outrider.types import JudgingRule, SparseScores, TokenScores

Ints = NDArray[np.int64]
_RULES = (JudgingRule.GREEDY, JudgingRule.COUPLED, JudgingRule.REJECTION)


@dataclass(frozen=True, slots=True)
class PlainRows:
    """What kernels are told of sessions, whatever their texts are."""

    words: Words  # [B, columns]
    found: Ints  # [B] the column in which the next token is found
    bounds: NDArray[np.float64]  # [B] of a row's largest logit

    @classmethod
    def of(cls, metadata: Sequence[SamplingMetadata], vocab_size: int) -> PlainRows:
        """Of sessions for which ``may_be_plain`` is true."""
        parts = [
            part
            for own in metadata
            for part in (place(0, 0, 0, 0, 0, min(own.limit or vocab_size, vocab_size)), own.last)
        ]
        return cls(
            Rows.of(parts, NO_IDS).words,
            np.array([drawn_column(own) for own in metadata], dtype=np.int64),
            np.array([own.bound for own in metadata]),
        )

    def selected(self, places: NDArray[np.intp]) -> PlainRows:
        """Those at these places."""
        return PlainRows(self.words[places], self.found[places], self.bounds[places])

    @staticmethod
    def joined(parts: Sequence[PlainRows]) -> PlainRows:
        """One after the other."""
        return PlainRows(
            np.concatenate([part.words for part in parts]),
            np.concatenate([part.found for part in parts]),
            np.concatenate([part.bounds for part in parts]),
        )

    def at(self, bases: Ints) -> Rows:
        """Rows of logits one after the other, each for the token after ``bases`` [B] tokens."""
        words = self.words.copy()
        words[:, Column.INDEX] = np.arange(len(words))
        words[:, Column.POSITION] = words[:, Column.BASE] = bases
        return Rows(words, NO_IDS)


@dataclass(frozen=True, slots=True)
class PlainTokens:
    """What follows each text."""

    token_ids: Ints  # [B] -1 where nothing can be drawn
    masses: NDArray[np.float32]  # [B] of ``SparseScores``; without meaning for others
    drawn: Ints  # [B] what ``PlainScoring.drawn`` has
    errors: dict[int, OutriderError]
    """Why a session fails, by its place."""


def may_be_plain(metadata: SamplingMetadata) -> bool:
    """Whether the plain steps of a session may be rows here: kernels draw its next token from the model's logits."""
    return metadata.is_fused and not metadata.is_adjusted and metadata.rule in _RULES


class PlainScoring:
    """Scoring of one position of each session, under way."""

    def __init__(
        self,
        logits: Tensor,  # [B, V]
        rows: PlainRows,
        samplings: Sequence[SessionSampling],
        texts: Sequence[Sequence[int]],
        bases: Ints,
    ) -> None:
        """``texts``: at least the first ``bases`` tokens of each session."""
        self._logits, self._rows = logits, rows
        self._samplings, self._texts, self._bases = samplings, texts, bases
        self._launch: Launch | None = launch(logits, rows.at(bases)) if has_kernels(logits.device) else None

    def drawn(self) -> Tensor | None:
        """Next token of each session, [B] int32 on the device; any number for an unsound row. None without kernels."""
        if self._launch is None:
            return None
        words, places = self._launch.on_device, self._drawn_places()
        return words[places] if isinstance(places, slice) else words.index_select(0, to_device(places, words.device))

    def tokens(self) -> PlainTokens:
        """Wait for the kernels; called once."""
        if self._launch is None:
            return self._of_outcomes(None)
        findings, count = self._launch.findings(), len(self._bases)
        places = self._drawn_places()
        drawn = findings.words[places].astype(np.int64)
        largest = findings.of(Found.LARGEST)
        bounds = self._rows.bounds
        is_sound = (largest > np.maximum(LOWEST_DRAWABLE, -bounds)) & (largest < bounds)  # false for no number
        if findings.of(Found.STATUS).any() or not is_sound.all():
            return self._of_outcomes(drawn)
        return PlainTokens(drawn, findings.of(Found.MASS)[:count].copy(), drawn, {})

    def _of_outcomes(self, drawn: Ints | None) -> PlainTokens:
        """Session by session: seldom on a GPU, where a row is unsound or its cuts were not found at once."""
        heads = zip(self._samplings, self._texts, self._bases.tolist(), strict=True)
        requests = [ScoreRequest(sampling, text, base) for sampling, text, base in heads]
        outcomes = Scoring(self._logits, requests, fused=self._launch is not None).outcomes()
        found = [_token_of(outcome) for outcome in outcomes]
        tokens = np.array([token_id for token_id, _ in found], dtype=np.int64)
        return PlainTokens(
            tokens,
            np.array([mass for _, mass in found], dtype=np.float32),
            tokens if drawn is None else drawn,
            {place: outcome.error for place, outcome in enumerate(outcomes) if outcome.error is not None},
        )

    def _drawn_places(self) -> slice | list[int]:
        count, columns = len(self._bases), self._rows.found
        first = int(columns[0])
        if (columns == first).all():
            return slice(first * count, (first + 1) * count)
        places: list[int] = (columns * count + np.arange(count)).tolist()
        return places


def _token_of(outcome: ScoreOutcome) -> tuple[int, float]:
    """The token that follows and its mass."""
    form = outcome.form
    if isinstance(form, TokenScores):
        return form.token_ids[0], math.nan
    if isinstance(form, SparseScores):
        return int(form.outside_token_ids[0]), float(form.outside_mass[0])
    return -1, math.nan


@torch.inference_mode()
def begin_plain(
    logits: Tensor,
    rows: PlainRows,
    samplings: Sequence[SessionSampling],
    texts: Sequence[Sequence[int]],
    bases: Ints,
) -> PlainScoring:
    """Start to score one position of each session over ``logits`` [B, V] of any floating type."""
    return PlainScoring(logits, rows, samplings, texts, bases)
