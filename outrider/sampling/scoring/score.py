"""Scoring of the K+1 positions of each session with PyTorch, in the form that its acceptance rule needs.

Sessions of one form are scored together. A session with non-finite logits, an item that breaks the contract, or
parameters that leave no token gets an error, which does not affect other sessions.

Shape letters: ``R`` rows, the K+1 positions of every session one after the other; ``V`` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import IntegrityError, OutriderError
from outrider.sampling.checks import row_errors
from outrider.sampling.logits_processors.process import process_logits
from outrider.sampling.logprobs import drawable_logprobs, position_logprobs
from outrider.sampling.rows import LogitRow, ScoreRequest
from outrider.sampling.scoring.contract import broken_contract
from outrider.sampling.scoring.forms import Form, Group, Scored, form_of
from outrider.types import CandidateLogprobs, LogprobsMode, ScoreForm

__all__ = ["ScoreOutcome", "ScoreRequest", "score"]

_MOST_LOGPROB_ROWS = 128
"""Positions whose logprobs are computed together: with a vocabulary of 128,000 they take 64 MiB."""


@dataclass(slots=True)  # construction of a frozen class takes twice as long
class ScoreOutcome:
    """Scores of one session, or its error."""

    form: ScoreForm | None
    logprobs: tuple[CandidateLogprobs, ...] = ()
    """[K+1] if requested."""
    error: OutriderError | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Inputs of one call."""

    raw: Tensor  # [R, V]
    processed: Tensor  # [R, V]
    rows: list[LogitRow]
    requests: Sequence[ScoreRequest]
    spans: list[range]
    """Rows of each request."""

    def source(self, i: int) -> Tensor:  # -> [R, V]
        """Logits of which a request's logprobs are."""
        return self.raw if self.requests[i].open.logprobs_mode is LogprobsMode.RAW else self.processed

    def group(self, chosen: Sequence[int]) -> Group:
        """Group of the chosen requests."""
        if len(chosen) == len(self.requests):
            return Group(self.processed, self.rows, self.requests)
        indices = [index for i in chosen for index in self.spans[i]]
        logits = self.processed[torch.tensor(indices, device=self.processed.device)]
        return Group(logits, [self.rows[index] for index in indices], [self.requests[i] for i in chosen])


@torch.inference_mode()
def score(logits: Tensor, requests: Sequence[ScoreRequest]) -> list[ScoreOutcome]:  # [R, V] float32
    """Score every request's K+1 positions, in the order of the requests.

    Raises ``IntegrityError`` if the number of rows differs from the number of positions, because rows can then not be
    assigned to sessions. Any other error is in the outcome of its session.
    """
    batch = _prepare(logits, requests)
    errors = _errors(batch)
    found: dict[int, Scored] = {}
    for form, chosen in _by_form(requests, errors).items():
        found |= zip(chosen, form(batch.group(chosen)), strict=True)
    logprobs = _logprobs(batch, found)
    return [
        ScoreOutcome(None, error=error) if error is not None else ScoreOutcome(found[i].form, logprobs.get(i, ()))
        for i, error in enumerate(errors)
    ]


def _prepare(logits: Tensor, requests: Sequence[ScoreRequest]) -> _Batch:
    rows: list[LogitRow] = []
    spans: list[range] = []
    for request in requests:
        rows.extend(request.rows())
        spans.append(range(len(rows) - request.num_positions, len(rows)))
    if len(rows) != len(logits):
        raise IntegrityError(f"{len(logits)} rows of logits for {len(rows)} positions to score")
    return _Batch(logits, process_logits(logits, rows), rows, requests, spans)


def _by_form(requests: Sequence[ScoreRequest], errors: Sequence[OutriderError | None]) -> dict[Form, list[int]]:
    chosen: dict[Form, list[int]] = {}
    for i, (request, error) in enumerate(zip(requests, errors, strict=True)):
        if error is None:
            chosen.setdefault(form_of(request.open), []).append(i)
    return chosen


def _errors(batch: _Batch) -> list[OutriderError | None]:
    """First error of each session; one unsound position fails the whole session."""
    of_rows = row_errors(batch.raw, batch.processed.amax(-1))
    vocab_size = batch.raw.shape[-1]
    return [
        broken_contract(request, vocab_size)
        or next((of_rows[index] for index in span if of_rows[index] is not None), None)
        for request, span in zip(batch.requests, batch.spans, strict=True)
    ]


def _logprobs(batch: _Batch, found: Mapping[int, Scored]) -> dict[int, tuple[CandidateLogprobs, ...]]:
    """Logprobs of the requests that want them, computed together: alone, each would wait for the device."""
    logprobs: dict[int, tuple[CandidateLogprobs, ...]] = {}
    for part in _alike(batch, found):
        first = batch.requests[part[0]].open
        indices = [index for i in part for index in batch.spans[i]]
        source = batch.source(part[0])
        is_run = indices == list(range(indices[0], indices[-1] + 1))
        rows = source[indices[0] : indices[-1] + 1] if is_run else source[torch.tensor(indices, device=source.device)]
        candidates = [position for i in part for position in found[i].candidates]
        positions = iter(
            position_logprobs(drawable_logprobs(rows, first.num_token_ids), candidates, first.num_logprobs or 0)
        )
        logprobs |= {i: tuple(itertools.islice(positions, len(batch.spans[i]))) for i in part}
    return logprobs


def _alike(batch: _Batch, found: Mapping[int, Scored]) -> Iterator[list[int]]:
    """Requests with logprobs by what these are of; in parts, since the logprobs of many rows take much memory."""
    groups: dict[object, list[int]] = {}
    for i in sorted(found):
        open_ = batch.requests[i].open
        if open_.num_logprobs is not None:
            key = open_.logprobs_mode, open_.num_token_ids, open_.num_logprobs
            groups.setdefault(key, []).append(i)
    for group in groups.values():
        part: list[int] = []
        num_rows = 0
        for i in group:
            if part and num_rows + len(batch.spans[i]) > _MOST_LOGPROB_ROWS:
                yield part
                part, num_rows = [], 0
            part.append(i)
            num_rows += len(batch.spans[i])
        yield part
