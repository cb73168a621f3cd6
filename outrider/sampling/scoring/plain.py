"""Scoring of plain steps from arrays: one position of each of many sessions. Without kernels, as on a CPU, sessions are
scored one by one.

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
from outrider.kernels.scoring import Found, Launch, launch
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.scoring.fused import Scoring
from outrider.sampling.scoring.score import ScoreOutcome
from outrider.sampling.scoring.session_rows import Ints, SessionRows, are_sound
from outrider.sampling.session import SessionSampling
from outrider.types import SparseScores, TokenScores


@dataclass(frozen=True, slots=True)
class PlainTokens:
    """What follows each text."""

    token_ids: Ints  # [B] -1 where nothing can be drawn
    masses: NDArray[np.float32]  # [B] of ``SparseScores``; without meaning for others
    drawn: Ints  # [B] what ``PlainScoring.drawn`` has
    errors: dict[int, OutriderError]
    """Why a session fails, by its place."""


class PlainScoring:
    """Scoring of one position of each session, under way."""

    def __init__(
        self,
        logits: Tensor,  # [B, V]
        rows: SessionRows,
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
        if not are_sound(findings, self._rows.bound):
            return self._of_outcomes(drawn)
        return PlainTokens(drawn, findings.of(Found.MASS)[:count].copy(), drawn, {})

    def _of_outcomes(self, drawn: Ints | None) -> PlainTokens:
        """Session by session: seldom on a GPU, where a row is unsound or its cuts were not found at once."""
        heads = zip(self._samplings, self._texts, self._bases.tolist(), strict=True)
        requests = [ScoreRequest(sampling, text, base) for sampling, text, base in heads]
        fused = self._launch is not None
        outcomes = Scoring(self._logits, requests, fused=fused, launched=self._launch).outcomes()
        found = [_token_of(outcome) for outcome in outcomes]
        tokens = np.array([token_id for token_id, _ in found], dtype=np.int64)
        return PlainTokens(
            tokens,
            np.array([mass for _, mass in found], dtype=np.float32),
            tokens if drawn is None else drawn,
            {place: outcome.error for place, outcome in enumerate(outcomes) if outcome.error is not None},
        )

    def _drawn_places(self) -> slice | list[int]:
        count, column = len(self._bases), self._rows.column
        if column is not None:
            return slice(column * count, (column + 1) * count)
        places: list[int] = (self._rows.found * count + np.arange(count)).tolist()
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
    rows: SessionRows,
    samplings: Sequence[SessionSampling],
    texts: Sequence[Sequence[int]],
    bases: Ints,
) -> PlainScoring:
    """Start to score one position of each session over ``logits`` [B, V] of any floating type."""
    return PlainScoring(logits, rows, samplings, texts, bases)
