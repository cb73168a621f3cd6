"""Asynchronous scoring: kernels are launched behind the forward, and their results are read later.

On a GPU most sessions are scored by ``outrider.kernels.scoring``, which reads the logits once, as the model computed
them. Sessions with logprobs of whole supports, and all sessions on a CPU, are scored by
``score.score`` when the results are read. Tokens and probabilities are equal within the contract of the kernels.

Shape letters: ``R`` rows, the K+1 positions of every session one after the other; ``V`` vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.errors import IntegrityError, OutriderError
from outrider.kernels.device_stream import to_device, to_host
from outrider.kernels.launching import has_kernels
from outrider.kernels.scoring import Findings, Found, Launch, launch
from outrider.sampling.checks import row_error
from outrider.sampling.logits_processors.grammar_masks import masked_rows, masks_of
from outrider.sampling.logits_processors.process import adjust_logits
from outrider.sampling.metadata import SamplingMetadata
from outrider.sampling.parameters import has_penalties
from outrider.sampling.rows import ScoreRequest
from outrider.sampling.scoring.contract import broken_contract, keep_contract
from outrider.sampling.scoring.positions import Layout, lay_out
from outrider.sampling.scoring.row_logprobs import RowLogprobs
from outrider.sampling.scoring.score import ScoreOutcome, score
from outrider.sampling.scoring.session_rows import LOWEST_DRAWABLE, drawn_column
from outrider.types import (
    CandidateLogprobs,
    FloatArray,
    IntArray,
    JudgingRule,
    ScoreForm,
    SparseScores,
    TokenScores,
    TypicalScores,
)

_SHORT = 2
"""``Found.STATUS`` from here on: the kernels could not find the truncation threshold."""


@dataclass(frozen=True, slots=True)
class _LaunchedGroup:
    """Sessions whose kernels were launched."""

    layout: Layout
    launch: Launch
    finite: Tensor | None
    """[R] on the host, whether the model's own logits are finite, if the kernels read adjusted ones; valid once the
    launch has ended."""


@dataclass(frozen=True, slots=True)
class _LaunchedLogprobs:
    """Logprobs of some sessions, under way."""

    numbers: Sequence[int]
    indices: Sequence[int]
    """Place of each row's token among the words that the kernels find."""
    rows: RowLogprobs

    def of(self, findings: Findings) -> dict[int, tuple[CandidateLogprobs, ...]]:
        """Logprobs by session."""
        found = self.rows.batched(findings.words[list(self.indices)])
        return dict(zip(self.numbers, found.rows(), strict=True))


class Scoring:
    """Scoring of one batch of sessions, under way."""

    def __init__(
        self, logits: Tensor, requests: Sequence[ScoreRequest], *, fused: bool, launched: Launch | None = None
    ) -> None:
        """``launched``: kernels under way over the rows of all requests, which keep the contract and are unadjusted."""
        self._logits = logits
        self._requests = requests
        self._starts = _starts_of(requests)
        if self._starts[-1] != len(logits):
            raise IntegrityError(f"{len(logits)} rows of logits for {self._starts[-1]} positions to score")
        self._metadata = [request.session.metadata for request in requests]
        self._fused = [i for i, request in enumerate(requests) if fused and _is_fused(request)]
        self._outcomes: dict[int, ScoreOutcome] = {}
        if launched is None and not keep_contract([requests[i] for i in self._fused], logits.shape[-1]):
            self._fail_invalid_requests()
        sound = [i for i in self._fused if i not in self._outcomes]
        can_mask = logits.dtype is not torch.float16  # has no number for what is refused
        self._masked = [i for i in sound if self._metadata[i].is_masked and can_mask]
        changed = [i for i in sound if self._metadata[i].is_adjusted]
        self._adjusted = [i for i in changed if i not in self._masked]
        self._first = self._launch([i for i in sound if not self._metadata[i].is_adjusted], launched)
        self._logprobs = None if self._first is None else self._launch_logprobs(self._first)

    def outcomes(self) -> list[ScoreOutcome]:
        """Wait for the kernels, score the other sessions, and return outcomes in request order. Call once."""
        parts = self._parts
        self._score(self._missing(self._fused))
        for part in parts:
            self._take(part)
        if len(self._outcomes) < len(self._requests):
            short = self._missing(self._adjusted)
            if (wider := self._launch(short, wide=True)) is not None:
                self._take(wider)
            self._score(self._missing())
        return [self._outcomes[i] for i in range(len(self._requests))]

    def launch_all(self) -> bool:
        """Launch what waits for masks of grammars; False if a session is not scored by kernels from the model's own
        logits.
        """
        if len(self._fused) < len(self._requests) or self._adjusted:
            return False
        return bool(self._parts)

    def drawn(self) -> Tensor | None:
        """Next token of each session, [R] int32 on the device, valid once the kernels have ended.

        None if there are draft tokens or the kernels do not draw for all sessions. For an unsound row, any number.
        Waits for masks of grammars.
        """
        if self._has_drafts or len(self._fused) < len(self._requests):
            return None
        if any(has_penalties(self._requests[i].open.sampling) for i in self._adjusted):
            return None  # what they count is copied in a way that waits for the forward
        if sum(len(part.layout.spans) for part in self._parts) < len(self._requests):
            return None
        indices, words = self._drawn_indices(), [part.launch.on_device for part in self._parts]
        on_device = words[0] if len(words) == 1 else torch.cat(words)
        if isinstance(indices, slice):
            return on_device[indices]
        return on_device.index_select(0, to_device(indices, on_device.device))

    def drawn_token(self, index: int) -> int:
        """Token of ``drawn`` for session ``index``, on the host; only after ``outcomes``."""
        return self._drawn_tokens[index]

    @functools.cached_property
    def _drawn_tokens(self) -> list[int]:
        if not self._parts:
            raise ValueError("nothing was drawn on the device")
        words = np.concatenate([part.launch.findings().words for part in self._parts])
        tokens: list[int] = words[self._drawn_indices()].tolist()
        return tokens

    def _drawn_indices(self) -> slice | list[int]:
        """Indices of each session's token among the words of all parts, if all have one row."""
        count, columns = len(self._requests), [drawn_column(metadata) for metadata in self._metadata]
        if len(self._parts) == 1 and len(set(columns)) == 1:
            return slice(columns[0] * count, (columns[0] + 1) * count)
        indices, start = [0] * count, 0
        for part in self._parts:
            num_rows = len(part.layout.rows)
            for i, row, _, _ in part.layout.spans:
                indices[i] = start + columns[i] * num_rows + row
            start += part.layout.rows.num_found
        return indices

    @functools.cached_property
    def _parts(self) -> list[_LaunchedGroup]:
        """Launches: with the masked and the adjusted rows, for which the masks of grammars have to be made."""
        parts = self._first, self._launch_masked(), self._launch_adjusted()
        return [part for part in parts if part is not None]

    @property
    def _has_drafts(self) -> bool:
        return any(request.draft_token_ids for request in self._requests)

    def _launch(
        self, chosen: Sequence[int], launched: Launch | None = None, *, wide: bool = False
    ) -> _LaunchedGroup | None:
        if not chosen:
            return None
        layout = lay_out(self._requests, self._starts, chosen, self._logits.shape[-1])
        return _LaunchedGroup(layout, launched or launch(self._logits, layout.rows, wide=wide), None)

    def _launch_logprobs(self, part: _LaunchedGroup) -> _LaunchedLogprobs | None:
        """Logprobs of the tokens that the kernels find, where they are asked for."""
        spans = [span for span in part.layout.spans if self._requests[span[0]].open.num_logprobs is not None]
        if not spans:
            return None
        device, num_rows = self._logits.device, len(part.layout.rows)
        columns = [drawn_column(self._metadata[i]) * num_rows for i, *_ in spans]
        indices = [
            column + row
            for column, (_, start, stop, _) in zip(columns, spans, strict=True)
            for row in range(start, stop)
        ]
        rows = [row for i, *_ in spans for row in range(self._starts[i], self._starts[i + 1])]
        logits = (
            self._logits if len(rows) == len(self._logits) else self._logits.index_select(0, to_device(rows, device))
        )
        tokens = part.launch.on_device.index_select(0, to_device(indices, device))
        samplings = [self._requests[i].session for i, *_ in spans]
        counts = np.array([stop - start for _, start, stop, _ in spans], dtype=np.int64)
        return _LaunchedLogprobs([i for i, *_ in spans], indices, RowLogprobs(logits, tokens, samplings, counts))

    def _fail_invalid_requests(self) -> None:
        for i in self._fused:
            if (error := broken_contract(self._requests[i], self._logits.shape[-1])) is not None:
                self._outcomes[i] = ScoreOutcome(None, error=error)

    def _missing(self, others: Sequence[int] = ()) -> list[int]:
        """Sessions without an outcome that are not among the ``others``."""
        known = {*self._outcomes, *others}
        return [i for i in range(len(self._requests)) if i not in known]

    def _launch_masked(self) -> _LaunchedGroup | None:
        """Rows with a grammar alone are masked in the model's own logits."""
        masks = [self._requests[i].masks or masks_of(self._requests[i]) for i in self._masked]
        if masks:
            masked_rows(self._logits, [self._starts[i] for i in self._masked], masks)
        return self._launch(self._masked)

    def _launch_adjusted(self) -> _LaunchedGroup | None:
        """Launch rows with penalties, bias or bans: they alone pay for a float32 copy and the way through PyTorch."""
        if not self._adjusted:
            return None
        raw = self._rows_of(self._adjusted)
        described = [row for i in self._adjusted for row in self._requests[i].rows()]
        requests = [self._requests[i] for i in self._adjusted]
        layout = lay_out(requests, _starts_of(requests), range(len(requests)), raw.shape[-1], indices=self._adjusted)
        finite = to_host(torch.isfinite(raw).all(-1))  # before the mark that the launch sets
        return _LaunchedGroup(layout, launch(adjust_logits(raw, described), layout.rows), finite)

    def _rows_of(self, chosen: Sequence[int]) -> Tensor:  # [r, V] float32
        """A copy of the rows of these requests."""
        if len(chosen) == len(self._requests):
            return self._logits.to(torch.float32, copy=True)
        return torch.cat([self._logits[self._starts[i] : self._starts[i + 1]] for i in chosen]).float()

    def _score(self, chosen: Sequence[int]) -> None:
        """Scores computed by PyTorch."""
        if chosen:
            logits = self._logits.float() if len(chosen) == len(self._requests) else self._rows_of(chosen)
            outcomes = score(logits, [self._requests[i] for i in chosen])
            self._outcomes.update(zip(chosen, outcomes, strict=True))

    def _take(self, part: _LaunchedGroup) -> None:
        findings = part.launch.findings()
        answers = _Answers(findings)
        flaws: list[int] = findings.of(Found.STATUS).tolist()
        largest: list[float] = findings.of(Found.LARGEST).tolist()
        finite = [flaw % _SHORT == 0 for flaw in flaws] if part.finite is None else part.finite.tolist()
        # As nearly always. Adjusted logits may be no numbers, which are found one by one.
        is_sound = part.finite is None and all(finite) and _is_drawable(largest, part.layout.bound)
        launched = self._logprobs if part is self._first else None
        logprobs = {} if launched is None else launched.of(findings)
        for i, start, stop, first_id in part.layout.spans:
            metadata = self._metadata[i]
            error = None if is_sound else _first_error(finite[start:stop], largest[start:stop], metadata.bound)
            if error is not None:
                self._outcomes[i] = ScoreOutcome(None, error=error)
            elif max(flaws[start:stop]) < _SHORT:  # otherwise searched for more widely, or left to `_score`
                form = answers.form(metadata, self._requests[i], slice(start, stop), first_id)
                self._outcomes[i] = ScoreOutcome(form, logprobs.get(i, ()))


def _is_fused(request: ScoreRequest) -> bool:
    """True if kernels score a request. Those with logprobs of more candidates than the token found are left out."""
    metadata = request.session.metadata
    if request.open.num_logprobs is None:
        return metadata.is_fused
    return metadata.may_be_row and not (metadata.rule is JudgingRule.REJECTION and request.draft_token_ids)


def _starts_of(requests: Sequence[ScoreRequest]) -> list[int]:
    """Offsets of each request's rows when they lie one after the other, and the end of the last one's."""
    return list(itertools.accumulate((request.num_positions for request in requests), initial=0))


class _Answers:
    """Results of the kernels as scores; each column is read once.

    Arrays are views of one copy: what is told outlives the memory in which kernels answer.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = Findings(findings.words.copy(), findings.num_rows)

    def form(self, metadata: SamplingMetadata, request: ScoreRequest, span: slice, first_id: int) -> ScoreForm:
        """One session's scores from the rows of its span; its supports begin at ``first_id``."""
        if metadata.rule is JudgingRule.GREEDY:
            return TokenScores(tuple(self._likeliest[span]))
        if metadata.rule is JudgingRule.COUPLED:
            return TokenScores(tuple(self._gumbel_argmax[span]))
        if metadata.rule is JudgingRule.TYPICAL:
            drafts = slice(span.start, span.stop - 1)
            return TypicalScores(
                self._support_probs[first_id : first_id + len(request.draft_token_ids)],
                self._entropies[drafts],
                self._argmax_ids[drafts],
                int(self._outside_ids[span.stop - 1]),
            )
        num_ids = 0 if request.support is None else len(request.support.token_ids)
        return SparseScores(
            self._support_probs[first_id : first_id + num_ids], self._masses[span], self._outside_ids[span]
        )

    @functools.cached_property
    def _likeliest(self) -> list[int]:
        tokens: list[int] = self._argmax_ids.tolist()
        return tokens

    @functools.cached_property
    def _gumbel_argmax(self) -> list[int]:
        tokens: list[int] = self._findings.of(Found.GUMBEL_ARGMAX).tolist()
        return tokens

    @functools.cached_property
    def _argmax_ids(self) -> IntArray:
        return self._findings.of(Found.ARGMAX)

    @functools.cached_property
    def _outside_ids(self) -> IntArray:
        return self._findings.of(Found.OUTSIDE)

    @functools.cached_property
    def _masses(self) -> FloatArray:
        return self._findings.of(Found.MASS)

    @functools.cached_property
    def _entropies(self) -> FloatArray:
        return self._findings.of(Found.ENTROPY)

    @functools.cached_property
    def _support_probs(self) -> FloatArray:
        return self._findings.support_probs


@torch.inference_mode()
def begin_scoring(logits: Tensor, requests: Sequence[ScoreRequest], *, fused: bool | None = None) -> Scoring:
    """Start to score every request's K+1 positions over ``logits`` [R, V] of any floating type.

    ``fused`` says whether kernels are used; None: on a GPU. Raises as ``scoring.score`` does.
    """
    return Scoring(logits, requests, fused=has_kernels(logits.device) if fused is None else fused)


def _first_error(finite: Sequence[bool], largest: Sequence[float], bound: float) -> OutriderError | None:
    """Error of a session, by its rows' largest logits before the temperature."""
    for is_finite, logit in zip(finite, largest, strict=True):
        if is_finite and _is_drawable([logit], bound):
            continue
        if (error := row_error(finite=is_finite, largest=_tempered(logit, bound))) is not None:
            return error
    return None


def _is_drawable(largest: Sequence[float], bound: float) -> bool:
    """True if nothing is wrong with finite rows that have these largest logits."""
    # The least and the largest pass over what is no number; a sum does not.
    return max(LOWEST_DRAWABLE, -bound) < min(largest) and max(largest) < bound and not math.isnan(sum(largest))


def _tempered(largest: float, bound: float) -> float:
    """Largest logit of a row over its temperature, as far as it tells what is wrong with the row."""
    if largest <= LOWEST_DRAWABLE:
        return -math.inf
    return largest if abs(largest) < bound else math.copysign(math.inf, largest)
