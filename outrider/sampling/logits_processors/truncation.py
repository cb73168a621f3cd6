"""Truncation by min-p, top-k and top-p, in vLLM's order: each reads what the one before has left.

* min-p drops tokens whose probability is below its share of the largest.
* top-k keeps every token whose logit is at least the k-th largest, so all that tie with it (as vLLM does).
* top-p keeps the smallest set, best first, with at least its mass: the token that crosses stays. Among equal
  probabilities the lowest ids come first.

Rows at temperature 0 are left alone.

Shape letters: ``M`` rows with the parameter, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.kernels.ordering import largest, leading_mass
from outrider.sampling.logits_processors.workspace import Workspace
from outrider.sampling.parameters import is_greedy
from outrider.sampling.rows import SessionSpan
from outrider.sampling.softmax import softmax_rows
from outrider.types import SamplingParams

_MASKED = float("-inf")
_FIRST_WIDTH = 4096
"""Number of tokens that top-p sorts first; it sorts all if these do not hold the mass."""


def truncate(workspace: Workspace, spans: Sequence[SessionSpan]) -> None:
    """Mask the tokens that the parameters of each row exclude."""
    drawn = [span for span in spans if not is_greedy(span.open)]
    for wants, cut in ((_wants_min_p, _cut_min_p), (_wants_top_k, _cut_top_k), (_wants_top_p, _cut_top_p)):
        _cut(workspace, [span for span in drawn if wants(span.open.sampling)], cut)


def _cut(
    workspace: Workspace,
    spans: Sequence[SessionSpan],
    cut: Callable[[Workspace, Tensor, Sequence[SamplingParams]], Tensor],
) -> None:
    if spans:
        samplings = [span.open.sampling for span in spans for _ in span.rows]
        chosen = [index for span in spans for index in span.indices]
        workspace.replace(chosen, lambda logits: logits.masked_fill(cut(workspace, logits, samplings), _MASKED))


def _wants_min_p(sampling: SamplingParams) -> bool:
    return sampling.min_p > 0


def _wants_top_k(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0


def _wants_top_p(sampling: SamplingParams) -> bool:
    return sampling.top_p < 1


def _cut_min_p(workspace: Workspace, logits: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:  # [M, V] bool
    probs = softmax_rows(logits)
    share = workspace.column([sampling.min_p for sampling in samplings])
    return probs < share * probs.amax(-1, keepdim=True)


def _cut_top_k(workspace: Workspace, logits: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:  # [M, V] bool
    counts = [min(sampling.top_k, workspace.vocab_size) for sampling in samplings]
    best = logits.topk(max(counts), dim=-1).values
    return logits < best.gather(-1, workspace.column([count - 1 for count in counts], torch.int64))


def _cut_top_p(workspace: Workspace, logits: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:  # [M, V] bool
    probs = softmax_rows(logits)
    mass = workspace.column([sampling.top_p for sampling in samplings], torch.float64)
    width = min(_FIRST_WIDTH, workspace.vocab_size)
    while True:
        ordered, token_ids = largest(probs, width)
        kept, _ = leading_mass(ordered, mass)
        if width == workspace.vocab_size or not bool(kept[:, -1].any()):
            return torch.ones_like(probs, dtype=torch.bool).scatter_(-1, token_ids, ~kept)
        width = workspace.vocab_size
