"""From requests to the rows that the scoring kernels are told of: plain numpy.

Knows what each form needs of a row, and nothing of what is found.

Shape letters: ``R`` rows, the K+1 positions of every chosen session one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kernels.scoring import Rows, Wish
from outrider.engine.sampling.forms import coupled_form, sparse_form, typical_form
from outrider.engine.sampling.process import SMALLEST_TEMPERATURE
from outrider.engine.sampling.rows import ScoreRequest, is_greedy
from outrider.engine.sampling.scoring import form_of
from outrider.ports import Open

# Plain numbers: combining flags for every row takes longer than all the rest.
_DRAWS, _OUTSIDE, _ENTROPY, _COUPLED = map(int, (Wish.DRAWS, Wish.DRAWS | Wish.EXCLUDES, Wish.ENTROPY, Wish.COUPLED))
_CUTS = int(Wish.CUTS)


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows, and which are whose."""

    rows: Rows
    spans: tuple[tuple[int, int, int, int], ...]
    """Of each session: its number, its rows' start and stop, where its supports' ids begin."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """What one session's form needs."""

    wishes: list[int]  # [K+1]
    counts: list[int]  # [K+1] of the support
    token_ids: Sequence[int] | NDArray[np.integer]


def lay_out(
    requests: Sequence[ScoreRequest],
    starts: Sequence[int],
    chosen: Sequence[int],
    vocab_size: int,
    *,
    places: Sequence[int] | None = None,
) -> Layout:
    """Rows of the chosen requests, whose logits begin at ``starts``; ``places`` are other numbers to give them."""
    asks = [_ask(requests[i]) for i in chosen]
    lengths = np.array([len(ask.wishes) for ask in asks])
    stops = np.cumsum(lengths)
    num_ids = np.cumsum([0, *(len(ask.token_ids) for ask in asks)])
    within = np.arange(stops[-1]) - np.repeat(stops - lengths, lengths)

    def each(values: Sequence[float], dtype: type[np.generic] = np.int64) -> NDArray[Any]:
        return np.repeat(np.array(values, dtype=dtype), lengths)

    samplings = [requests[i].open.sampling for i in chosen]
    bases = each([requests[i].base for i in chosen])
    rows = Rows(
        indices=each([starts[i] for i in chosen]) + within,
        wishes=np.array([wish for ask in asks for wish in ask.wishes])
        | each([_cuts(requests[i].open) for i in chosen]),
        limits=each([min(requests[i].open.num_token_ids or vocab_size, vocab_size) for i in chosen]),
        temperatures=each([_temperature(requests[i]) for i in chosen], np.float64),
        seeds=each([requests[i].open.seed for i in chosen], np.uint64),
        positions=bases + within,
        bases=bases,
        min_ps=each([sampling.min_p for sampling in samplings], np.float64),
        top_ks=each([sampling.top_k for sampling in samplings]),
        top_ps=each([sampling.top_p for sampling in samplings], np.float64),
        support_counts=np.array([count for ask in asks for count in ask.counts]),
        support_ids=np.concatenate([np.asarray(ask.token_ids, dtype=np.int64) for ask in asks]),
    )
    numbers = chosen if places is None else places
    firsts = (stops - lengths).tolist(), stops.tolist(), num_ids.tolist()
    return Layout(rows, tuple(zip(numbers, *firsts, strict=False)))


def _ask(request: ScoreRequest) -> _Ask:
    form, num_drafts = form_of(request.open), len(request.draft_token_ids)
    if form is sparse_form:
        support = request.support
        if support is None or not len(support.token_ids):
            return _Ask([_DRAWS] * (num_drafts + 1), [0] * (num_drafts + 1), ())
        return _Ask([_OUTSIDE] * num_drafts + [_DRAWS], [*support.counts.tolist(), 0], support.token_ids)
    if form is typical_form:
        return _Ask([_ENTROPY] * num_drafts + [_DRAWS], [1] * num_drafts + [0], request.draft_token_ids)
    wish = _COUPLED if form is coupled_form else 0
    return _Ask([wish] * (num_drafts + 1), [0] * (num_drafts + 1), ())


def _cuts(open_: Open) -> int:
    sampling = open_.sampling
    return _CUTS if not is_greedy(open_) and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0) else 0


def _temperature(request: ScoreRequest) -> float:
    return 1.0 if is_greedy(request.open) else max(request.open.sampling.temperature, SMALLEST_TEMPERATURE)
