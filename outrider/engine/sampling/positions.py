"""From requests to the rows that the scoring kernels are told of: plain numpy.

Knows where rows are and what each asks of a support; the words that no step changes are in a session's ``Terms``.

Shape letters: ``C`` chosen sessions; ``R`` rows, the K+1 positions of every chosen session one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.engine.kernels.scoring import Column, Rows, Words
from outrider.engine.sampling.forms import sparse_form, typical_form
from outrider.engine.sampling.rows import ScoreRequest
from outrider.engine.sampling.terms import Terms, terms_of
from outrider.types import Support

_NO_IDS: Words = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows, and which are whose."""

    rows: Rows
    spans: tuple[tuple[int, int, int, int], ...]
    """Of each session: its number, its rows' start and stop, where its supports' ids begin."""
    bound: float
    """The least of the sessions' ``Terms.bound``."""


def lay_out(
    requests: Sequence[ScoreRequest],
    starts: Sequence[int],
    chosen: Sequence[int],
    vocab_size: int,
    *,
    places: Sequence[int] | None = None,
) -> Layout:
    """Rows of the chosen requests, whose logits begin at ``starts``; ``places`` are other numbers to give them."""
    asking = [requests[i] for i in chosen]
    terms = [terms_of(request.open) for request in asking]
    supports = [_support(request, of) for request, of in zip(asking, terms, strict=True)]
    lengths = np.array([request.num_positions for request in asking])  # [C]
    stops = np.cumsum(lengths)
    firsts = stops - lengths
    whose = np.repeat(np.arange(len(asking)), lengths)  # [R]
    within = np.arange(len(whose)) - firsts[whose]
    # Without a support to ask about, a draft token's row is as the last.
    kinds = np.array([2 * i + (support is None) for i, support in enumerate(supports)])[whose]
    kinds[stops - 1] = np.arange(1, 2 * len(asking), 2)
    words = np.frombuffer(b"".join([of.words for of in terms]), dtype=np.int32).reshape(-1, len(Column))[kinds]
    words[:, Column.INDEX] = np.array([starts[i] for i in chosen])[whose] + within
    words[:, Column.BASE] = bases = np.array([request.base for request in asking])[whose]
    words[:, Column.POSITION] = bases + within
    words[:, Column.LIMIT] = np.minimum(words[:, Column.LIMIT], vocab_size)
    ids = _place_supports(words, firsts.tolist(), supports)
    counts = (0 if support is None else len(support.token_ids) for support in supports)
    of_ids = itertools.accumulate(counts, initial=0)
    spans = zip(chosen if places is None else places, firsts.tolist(), stops.tolist(), of_ids, strict=False)
    return Layout(Rows(words, ids), tuple(spans), min(of.bound for of in terms))


def _support(request: ScoreRequest, terms: Terms) -> Support | None:
    """The ids that its rows ask about, if any."""
    if terms.form is sparse_form and request.support is not None and len(request.support.token_ids):
        return request.support
    if terms.form is typical_form and request.draft_token_ids:
        ids = np.array(request.draft_token_ids, dtype=np.int32)
        return Support(np.ones_like(ids), ids)
    return None


def _place_supports(words: Words, firsts: Sequence[int], supports: Sequence[Support | None]) -> Words:
    """Tell the rows [R] where their supports are among the ids of all, which are given back."""
    known = [(first, support) for first, support in zip(firsts, supports, strict=True) if support is not None]
    if not known:
        return _NO_IDS
    counts = np.zeros(len(words), dtype=np.int32)
    for first, support in known:
        counts[first : first + len(support.counts)] = support.counts
    words[:, Column.SUPPORT_STOP] = stops = np.cumsum(counts, dtype=np.int32)
    words[:, Column.SUPPORT_START] = stops - counts
    return np.concatenate([support.token_ids for _, support in known], dtype=np.int32, casting="unsafe")
