"""Forms of scores, one for each judging rule, computed for a group of sessions at once.

A form holds what the acceptance rule needs of the processed distribution, and the tokens that may be emitted at each
position. All rows are sound: ``checks`` has been applied.

Shape letters: ``R`` rows, the K+1 positions of every session one after the other; ``V`` vocabulary; ``M`` ids of all
supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.ports import Open
from outrider.randomness.streams import Stream
from outrider.sampling.draws import gumbel_argmax, gumbel_argmax_by_groups, stream_rows
from outrider.sampling.rows import LogitRow, ScoreRequest
from outrider.sampling.softmax import row_sums, softmax_rows
from outrider.types import JudgingRule, ScoreForm, SparseScores, Support, TokenScores, TypicalScores

ENTROPY_OFFSET = 1e-5
"""Offset in the logarithm of the entropy of typical acceptance, as in Medusa and vLLM."""

EMPTY_SUPPORT = Support(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))
"""Support of a session without draft tokens."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of one session, and the tokens that may be emitted at each of its positions."""

    form: ScoreForm
    candidates: list[list[int]]  # K+1 lists of distinct ids; empty lists where whole rows travel


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions with scores of the same form."""

    logits: Tensor  # [R, V] processed
    rows: Sequence[LogitRow]  # R
    requests: Sequence[ScoreRequest]

    def spans(self) -> Iterator[tuple[ScoreRequest, slice]]:
        """Each session with the slice of its rows."""
        start = 0
        for request in self.requests:
            yield request, slice(start, start + request.num_positions)
            start += request.num_positions


Form = Callable[[Group], list[Scored]]


def greedy_form(group: Group) -> list[Scored]:
    """Greedy: the most likely token at each position."""
    return _tokens(group, group.logits.argmax(-1))


def coupled_form(group: Group) -> list[Scored]:
    """Coupled: the Gumbel argmax with the noise that draft and target share, at each position."""
    return _tokens(group, gumbel_argmax(group.logits, stream_rows(group.rows, Stream.COUPLED, group.logits.device)))


def _tokens(group: Group, token_ids: Tensor) -> list[Scored]:  # [R]
    ids: list[int] = token_ids.tolist()
    return [Scored(TokenScores(tuple(ids[span])), [[token_id] for token_id in ids[span]]) for _, span in group.spans()]


def sparse_form(group: Group) -> list[Scored]:
    """Sparse rejection: target probabilities on each support, the mass outside it, and a token drawn outside.

    The mass is summed directly, because 1 minus the rest loses small masses.
    """
    device = group.logits.device
    rows, ids, counts = _supports(group)
    indices = (torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device))
    outside = softmax_rows(group.logits)
    inside = outside[indices]  # [M]
    outside[indices] = 0.0
    mass = row_sums(outside)
    drawn = gumbel_argmax_by_groups(outside.log(), group.rows)
    drawn = torch.where(mass > 0, drawn, -1)
    support_probs, outside_mass = inside.cpu().numpy(), mass.cpu().numpy()
    outside_ids = drawn.to(torch.int32).cpu().numpy()
    ends = np.cumsum(counts)
    scored = []
    for request, span in group.spans():
        probs = support_probs[ends[span.start] - counts[span.start] : ends[span.stop - 1]].copy()
        form = SparseScores(probs, outside_mass[span].copy(), outside_ids[span].copy())
        scored.append(Scored(form, _sparse_candidates(request, form) if _wants_logprobs(request) else []))
    return scored


def _supports(group: Group) -> tuple[Ids, Ids, Ids]:
    """Concatenated supports: row of each id [M], ids [M], and number of ids of each row [R]."""
    supports = [request.support or EMPTY_SUPPORT for request in group.requests]
    counts = [count for support in supports for count in (*support.counts.tolist(), 0)]
    ids = [support.token_ids.astype(np.int64) for support in supports]
    per_row = np.array(counts, dtype=np.int64)
    return np.repeat(np.arange(len(per_row)), per_row), np.concatenate(ids), per_row


def _sparse_candidates(request: ScoreRequest, form: SparseScores) -> list[list[int]]:
    """Tokens that may be emitted: the support where the target has mass, the draft token, the token drawn outside."""
    candidates: list[list[int]] = [[] for _ in form.outside_token_ids]
    start = 0
    support = request.support or EMPTY_SUPPORT
    for i, (draft_id, count) in enumerate(zip(request.draft_token_ids, support.counts.tolist(), strict=True)):
        stop = start + count
        ids = support.token_ids[start:stop]
        candidates[i] = ids[(form.support_probs[start:stop] > 0) | (ids == draft_id)].tolist()
        start = stop
    for ids_here, outside_id in zip(candidates, form.outside_token_ids.tolist(), strict=True):
        ids_here.extend([outside_id] if outside_id >= 0 else [])
    return candidates


def _wants_logprobs(request: ScoreRequest) -> bool:
    return request.open.num_logprobs is not None


def typical_form(group: Group) -> list[Scored]:
    """Typical: probabilities of the draft tokens, entropies and argmaxes, and a drawn bonus token.

    Source: Cai et al., "Medusa" (2024).
    """
    device = group.logits.device
    probs = softmax_rows(group.logits)
    entropies = -row_sums(probs * (probs + ENTROPY_OFFSET).log())
    last = [span.stop - 1 for _, span in group.spans()]
    log_weights = probs[torch.tensor(last, device=device)].log()
    bonus_ids: list[int] = gumbel_argmax_by_groups(log_weights, [group.rows[i] for i in last]).tolist()
    # The last position has no draft token; any id fills its place.
    draft_ids = [i for request in group.requests for i in (*request.draft_token_ids, 0)]
    drafted = probs.gather(-1, torch.tensor(draft_ids, device=device).unsqueeze(-1)).squeeze(-1)
    argmax_ids = group.logits.argmax(-1).to(torch.int32)
    columns = [column.cpu().numpy() for column in (drafted, entropies, argmax_ids)]
    scored = []
    for (request, span), bonus_id in zip(group.spans(), bonus_ids, strict=True):
        of_drafts = slice(span.start, span.stop - 1)
        drafted_probs, of_positions, best_ids = (column[of_drafts].copy() for column in columns)
        form = TypicalScores(drafted_probs, of_positions, best_ids, bonus_id)
        pairs = zip(request.draft_token_ids, form.argmax_token_ids.tolist(), strict=True)
        scored.append(Scored(form, [*(list(dict.fromkeys(pair)) for pair in pairs), [bonus_id]]))
    return scored


def form_of(open_: Open) -> Form:
    """Form of a session's scores, by its judging rule."""
    return _FORMS[open_.judging_rule]


_FORMS: dict[JudgingRule, Form] = {
    JudgingRule.GREEDY: greedy_form,
    JudgingRule.COUPLED: coupled_form,
    JudgingRule.REJECTION: sparse_form,
    JudgingRule.TYPICAL: typical_form,
}
