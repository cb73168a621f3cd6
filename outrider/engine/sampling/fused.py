"""Scoring in two halves: kernels are started while the forward still runs, and asked for their answer later.

On a GPU most sessions are scored by ``outrider.engine.kernels.scoring``, which reads the logits once as the model gave
them. Sessions that want logprobs or whole rows, and all sessions on a CPU, are scored by ``scoring.score`` when the
answer is asked for. Tokens and probabilities are the same within the kernels' contract. Knows no device's events.

Shape letters: ``R`` rows, the K+1 positions of every session one after the other; ``V`` vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.device_inputs import to_device
from outrider.engine.kernels.launching import has_kernels
from outrider.engine.kernels.scoring import Findings, Found, Launch, launch, warm_up
from outrider.engine.sampling.checks import row_error
from outrider.engine.sampling.forms import coupled_form, greedy_form, sparse_form, typical_form
from outrider.engine.sampling.positions import Layout, lay_out
from outrider.engine.sampling.process import adjust_logits, needs_adjusting
from outrider.engine.sampling.rows import ScoreRequest
from outrider.engine.sampling.scoring import ScoreOutcome, broken_contract, form_of, score
from outrider.errors import IntegrityError, OutriderError
from outrider.ports import Open
from outrider.types import ScoreForm, SparseScores, TokenScores, TypicalScores

_SHORT = 2
"""``Found.UNFIT`` from here on: where the cuts are, the kernels could not tell."""
_PAST_FLOAT32 = 2.0**128 - 2.0**103
"""The least that float32 rounds to infinity."""
_LOWEST = -1e30
"""What kernels find no larger logit than this in has nothing to draw."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Sessions whose kernels are under way."""

    layout: Layout
    bounds: list[float]
    """[R] the largest logit is less, or float32 does not hold it once it is divided by the temperature."""
    launch: Launch
    finite: Tensor | None
    """[R] of the model's own logits, where others were given to the kernels."""


class Scoring:
    """One batch of sessions being scored."""

    def __init__(self, logits: Tensor, requests: Sequence[ScoreRequest], *, fused: bool) -> None:
        self._logits = logits
        self._requests = requests
        counts = [request.num_positions for request in requests]
        self._starts: list[int] = np.cumsum([0, *counts]).tolist()
        if self._starts[-1] != len(logits):
            raise IntegrityError(f"{len(logits)} rows of logits for {self._starts[-1]} positions to score")
        self._fused = [i for i, request in enumerate(requests) if fused and _is_fused(request.open)]
        self._outcomes: dict[int, ScoreOutcome] = {}
        for i in self._fused:
            if (error := broken_contract(requests[i], logits.shape[-1])) is not None:
                self._outcomes[i] = ScoreOutcome(None, error=error)
        sound = [i for i in self._fused if i not in self._outcomes]
        self._adjusted = [i for i in sound if needs_adjusting(requests[i].open)]
        self._first = self._launch([i for i in sound if not needs_adjusting(requests[i].open)])

    def outcomes(self) -> list[ScoreOutcome]:
        """Wait for the kernels and score whom they do not; in the order of the requests. May be called once."""
        second = self._launch_adjusted()
        others = sorted(set(range(len(self._requests))) - set(self._fused))
        self._score(others)
        for part in (self._first, second):
            if part is not None:
                self._take(part)
        short = sorted(set(self._fused) - set(self._adjusted) - set(self._outcomes))
        if (wider := self._launch(short, wide=True)) is not None:
            self._take(wider)
        self._score(sorted(set(range(len(self._requests))) - set(self._outcomes)))
        return [self._outcomes[i] for i in range(len(self._requests))]

    def drawn(self) -> Tensor | None:
        """[R] int32, on the device once the kernels have ended: the token that follows each session's text, where the
        kernels draw it for all and there are no drafts; else None. Where a row cannot be drawn from it is any number.
        """
        if self._first is None or len(self._first.layout.spans) < len(self._requests) or self._has_drafts:
            return None
        places = to_device(self._drawn_places(), self._logits.device)
        return self._first.launch.on_device.index_select(0, places)

    def drawn_token(self, index: int) -> int:
        """The same of session ``index``, on the host; not before ``outcomes``."""
        return self._drawn_tokens[index]

    @functools.cached_property
    def _drawn_tokens(self) -> list[int]:
        if self._first is None:
            raise ValueError("nothing was drawn on the device")
        tokens: list[int] = self._first.launch.findings().words[self._drawn_places()].tolist()
        return tokens

    def _drawn_places(self) -> list[int]:
        """Where among the words that the kernels find each session's token is, if all have one row."""
        count = len(self._requests)
        return [_column(request.open) * count + i for i, request in enumerate(self._requests)]

    @property
    def _has_drafts(self) -> bool:
        return any(request.draft_token_ids for request in self._requests)

    def _launch(self, chosen: Sequence[int], *, wide: bool = False) -> _Part | None:
        if not chosen:
            return None
        layout = lay_out(self._requests, self._starts, chosen, self._logits.shape[-1])
        return _Part(layout, _bounds(layout), launch(self._logits, layout.rows, wide=wide), None)

    def _launch_adjusted(self) -> _Part | None:
        """Only rows with penalties, bias or bans pay for a float32 copy and the way through PyTorch."""
        if not self._adjusted:
            return None
        raw = self._rows_of(self._adjusted)
        described = [row for i in self._adjusted for row in self._requests[i].rows()]
        requests = [self._requests[i] for i in self._adjusted]
        starts: list[int] = np.cumsum([0, *(request.num_positions for request in requests)]).tolist()
        layout = lay_out(requests, starts, range(len(requests)), raw.shape[-1], places=self._adjusted)
        adjusted = adjust_logits(raw, described)
        return _Part(layout, _bounds(layout), launch(adjusted, layout.rows), torch.isfinite(raw).all(-1))

    def _rows_of(self, chosen: Sequence[int]) -> Tensor:  # [r, V] float32
        spans = [self._logits[self._starts[i] : self._starts[i + 1]] for i in chosen]
        return torch.cat(spans).float()

    def _score(self, chosen: Sequence[int]) -> None:
        """Through PyTorch."""
        if chosen:
            logits = self._logits.float() if len(chosen) == len(self._requests) else self._rows_of(chosen)
            outcomes = score(logits, [self._requests[i] for i in chosen])
            self._outcomes.update(zip(chosen, outcomes, strict=True))

    def _take(self, part: _Part) -> None:
        findings = part.launch.findings()
        flaws: list[int] = findings.of(Found.UNFIT).tolist()
        errors = _errors(part, findings, flaws)
        for i, start, stop, first_id in part.layout.spans:
            wrong = [row for row in range(start, stop) if row in errors] if errors else []
            if wrong:
                self._outcomes[i] = ScoreOutcome(None, error=errors[wrong[0]])
            elif max(flaws[start:stop]) < _SHORT:  # otherwise searched for more widely, or left to `_score`
                self._outcomes[i] = ScoreOutcome(_form(self._requests[i], findings, slice(start, stop), first_id))


@torch.inference_mode()
def begin_scoring(logits: Tensor, requests: Sequence[ScoreRequest], *, fused: bool | None = None) -> Scoring:
    """Start to score every request's K+1 positions over ``logits`` [R, V] of any floating type.

    ``fused`` says whether kernels are used; None: on a GPU. Raises as ``scoring.score`` does.
    """
    return Scoring(logits, requests, fused=has_kernels(logits.device) if fused is None else fused)


@torch.inference_mode()
def warm_up_scoring(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """On a GPU, compile what any batch of sessions may need, so that none waits for another's first of its kind."""
    if has_kernels(device):
        warm_up(torch.zeros(1, vocab_size, dtype=dtype, device=device))


def _column(open_: Open) -> int:
    """Where the kernels leave the token that follows a text."""
    kind = form_of(open_)
    if kind is greedy_form:
        return Found.ARGMAX
    return Found.RACED if kind is coupled_form else Found.OUTSIDE


def _is_fused(open_: Open) -> bool:
    return open_.num_logprobs is None and form_of(open_) in {greedy_form, coupled_form, sparse_form, typical_form}


def _errors(part: _Part, findings: Findings, flaws: Sequence[int]) -> dict[int, OutriderError]:
    """By row; nearly always none. Plain Python: of the few rows there mostly are it is done sooner than in numpy."""
    finite = [flaw % _SHORT == 0 for flaw in flaws] if part.finite is None else part.finite.tolist()
    largest_logits = findings.of(Found.LARGEST).tolist()
    found: dict[int, OutriderError] = {}
    for row, (is_finite, largest, bound) in enumerate(zip(finite, largest_logits, part.bounds, strict=True)):
        if is_finite and _LOWEST < largest < bound and -bound < largest:
            continue
        told = _tempered(largest, bound)
        if (error := row_error(finite=is_finite, largest=told)) is not None:
            found[row] = error
    return found


def _tempered(largest: float, bound: float) -> float:
    """As much of a row's largest logit over its temperature as tells what is wrong with the row."""
    if largest <= _LOWEST:
        return -math.inf
    return largest if abs(largest) < bound else math.copysign(math.inf, largest)


def _bounds(layout: Layout) -> list[float]:
    bounds: list[float] = (layout.rows.temperatures * _PAST_FLOAT32).tolist()
    return bounds


def _form(request: ScoreRequest, findings: Findings, span: slice, first_id: int) -> ScoreForm:
    """One session's scores from the rows of its span; its supports begin at ``first_id``."""
    kind = form_of(request.open)
    if kind is greedy_form or kind is coupled_form:
        column = Found.ARGMAX if kind is greedy_form else Found.RACED
        return TokenScores(tuple(findings.of(column)[span].tolist()))
    outside_ids = findings.of(Found.OUTSIDE)
    if kind is typical_form:
        drafts = slice(span.start, span.stop - 1)
        return TypicalScores(
            findings.support_probs[first_id : first_id + len(request.draft_token_ids)].copy(),
            findings.of(Found.ENTROPY)[drafts].copy(),
            findings.of(Found.ARGMAX)[drafts].copy(),
            int(outside_ids[span.stop - 1]),
        )
    num_ids = 0 if request.support is None else len(request.support.token_ids)
    return SparseScores(
        findings.support_probs[first_id : first_id + num_ids].copy(),
        findings.of(Found.MASS)[span].copy(),
        outside_ids[span].copy(),
    )
