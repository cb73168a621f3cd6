"""Sampling parameters, turned into the logits of the distribution that is drawn from.

The order is vLLM's (``v1/sample/sampler.py``): allowed ids, bad words, minimum length, bias, penalties, then
temperature, min-p, top-k, top-p. Masked is -inf. Temperature 0 ends after the penalties.

As in vLLM a bad word counts only where all of it stands in the output: a prompt that ends in its beginning does not ban
its end. Draft tokens before a position are output to it.

Shape letters: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from outrider.engine.sampling.penalties import apply_penalties
from outrider.engine.sampling.rows import LogitRow, RowSpan, is_greedy, needs_history, spans_of
from outrider.engine.sampling.truncation import truncate
from outrider.engine.sampling.workspace import Workspace
from outrider.ports import Open

_MASKED = float("-inf")
SMALLEST_TEMPERATURE = 1e-30
"""Below it a division could overflow; the distribution is one-hot long before."""


def process_logits(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:  # [N, V] float32 -> [N, V] float32
    """The logits after every sampling parameter; the given tensor itself when no row asks for anything.

    A row may come out with every token masked: whoever draws from it must look.
    """
    spans = spans_of(rows)
    workspace = Workspace(logits)
    _adjust(workspace, spans)
    _divide_by_temperature(workspace, spans)
    truncate(workspace, spans)
    return workspace.logits


def adjust_logits(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:  # [N, V] float32 -> [N, V] float32
    """The logits after all that comes before the temperature; the given tensor itself when no row asks for any."""
    workspace = Workspace(logits)
    _adjust(workspace, spans_of(rows))
    return workspace.logits


def needs_adjusting(open_: Open) -> bool:
    """Whether ``adjust_logits`` does more than to keep ids below the limit."""
    sampling = open_.sampling
    return bool(
        sampling.allowed_token_ids
        or sampling.min_tokens
        or sampling.logit_bias
        or open_.banned_token_ids
        or needs_history(sampling)
    )


def _adjust(workspace: Workspace, spans: Sequence[RowSpan]) -> None:
    _limit_ids(workspace, spans)
    _keep_allowed(workspace, spans)
    _ban(workspace, spans)
    _add_bias(workspace, spans)
    apply_penalties(workspace, spans)


def _limit_ids(workspace: Workspace, spans: Sequence[RowSpan]) -> None:
    """Padded rows of the vocabulary are never drawn; a limit of 0 means there is none."""
    limits = {span.open.num_token_ids or workspace.vocab_size for span in spans}
    if len(limits) == 1 and (limit := limits.pop()) < workspace.vocab_size:
        workspace.writable()[:, limit:] = _MASKED
    for span in spans if limits else ():
        if 0 < span.open.num_token_ids < workspace.vocab_size:
            workspace.writable()[span.start : span.stop, span.open.num_token_ids :] = _MASKED


def _keep_allowed(workspace: Workspace, spans: Sequence[RowSpan]) -> None:
    wanted = [span for span in spans if span.open.sampling.allowed_token_ids]
    if not wanted:
        return
    logits = workspace.writable()
    banned = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for span in wanted:
        allowed = _known(span.open.sampling.allowed_token_ids, workspace.vocab_size)
        banned[span.start : span.stop] = True
        banned[span.start : span.stop, workspace.tensor(allowed)] = False
    logits.masked_fill_(banned, _MASKED)


def _ban(workspace: Workspace, spans: Sequence[RowSpan]) -> None:
    """Banned ids, ends before the minimum length, and the last token of a bad word that would be completed."""
    pairs = [
        (index, token_id)
        for span in spans
        for index, row in zip(span.indices, span.rows, strict=True)
        for token_id in _known(_banned_ids(row), workspace.vocab_size)
    ]
    if pairs:
        indices, token_ids = workspace.tensor([i for i, _ in pairs]), workspace.tensor([t for _, t in pairs])
        workspace.writable()[indices, token_ids] = _MASKED


def _banned_ids(row: LogitRow) -> Iterator[int]:
    yield from row.open.banned_token_ids
    if row.num_output_tokens < row.open.sampling.min_tokens:
        yield from row.open.eos_token_ids
    for word in row.open.sampling.bad_words:
        if word and _would_complete(row, word):
            yield word[-1]


def _would_complete(row: LogitRow, word: Sequence[int]) -> bool:
    start = row.length - (len(word) - 1)
    return start >= min(row.open.prompt_length, row.length) and tuple(row.tokens[start : row.length]) == word[:-1]


def _add_bias(workspace: Workspace, spans: Sequence[RowSpan]) -> None:
    entries = [
        (index, token_id, bias)
        for span in spans
        for token_id, bias in span.open.sampling.logit_bias
        if 0 <= token_id < workspace.vocab_size
        for index in span.indices
    ]
    if entries:
        indices, token_ids, biases = zip(*entries, strict=True)
        places = (workspace.tensor(indices), workspace.tensor(token_ids))
        workspace.writable().index_put_(places, workspace.tensor(biases, torch.float32), accumulate=True)


def _divide_by_temperature(workspace: Workspace, spans: Sequence[RowSpan]) -> None:
    temperatures = [
        1.0 if is_greedy(span.open) else span.open.sampling.temperature for span in spans for _ in span.rows
    ]
    if any(temperature != 1.0 for temperature in temperatures):
        column = workspace.column([max(temperature, SMALLEST_TEMPERATURE) for temperature in temperatures])
        workspace.writable().div_(column)


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Those the vocabulary has: a draft's may be smaller than the one a request was checked against."""
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
