"""PyTorch reference of ``experts``; runs on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from outrider.kernels.experts.layout import ExpertWeight, Mxfp4Matrix, Routing, SigmoidScores
from outrider.kernels.fp8_linear import Rounding, round_rows
from outrider.kernels.fp8_linear.reference import parts_of_bias


def route(logits: torch.Tensor, num_chosen: int, *, normalizes: bool, scores: SigmoidScores | None = None) -> Routing:
    """``logits`` [T, E] to the ``num_chosen`` best experts of each token and their weights."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scores is None:
        weights, ids = wide.softmax(-1).topk(num_chosen, -1)
    else:
        sigmoids = wide.sigmoid()
        ids = _within_groups(sigmoids + scores.bias, scores).topk(num_chosen, -1)[1]
        weights = sigmoids.gather(-1, ids)
    if normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be 0
    if scores is not None:
        weights = weights * scores.scale
    return Routing(ids.T.int().contiguous(), weights.T.contiguous())


def _within_groups(ranks: torch.Tensor, scores: SigmoidScores) -> torch.Tensor:
    """``ranks`` [T, E], those of experts in groups that are not chosen -inf."""
    if scores.num_groups == 1:
        return ranks
    groups = ranks.view(len(ranks), scores.num_groups, -1)
    best = groups.topk(2, -1)[0].sum(-1).topk(scores.num_groups_chosen, -1)[1]
    is_chosen = torch.zeros(groups.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(1, best, value=True)
    return groups.masked_fill(~is_chosen[..., None], float("-inf")).view_as(ranks)


_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_WIDENED_ROWS = 8192
"""Rows widened at once, which bounds memory."""


def widened_mxfp4(matrix: Mxfp4Matrix, dtype: torch.dtype) -> torch.Tensor:
    """The weight [R, K] in ``dtype``."""
    values = torch.tensor((*_FP4_VALUES, *(-value for value in _FP4_VALUES)), device=matrix.numbers.device)
    rows, size = matrix.numbers.shape[0], 2 * matrix.numbers.shape[1]
    found = torch.empty(rows, size, dtype=dtype, device=matrix.numbers.device)
    parts = (torch.split(tensor, _WIDENED_ROWS) for tensor in (matrix.numbers, matrix.scales, found))
    for numbers, scales, target in zip(*parts, strict=True):
        wide = values[torch.stack((numbers & 15, numbers >> 4), -1).int()].view(*scales.shape, -1)
        target.copy_(torch.ldexp(wide, scales.int().sub_(127)[..., None]).view_as(target))
    return found


def sum_experts(products: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``products`` [A, T, N] of tokens' experts added up: [T, N] of ``dtype``."""
    return products.sum(0).to(dtype)


class PlainExperts(ExpertWeight):
    """Products expert by expert."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight  # [E, N, K]

    def __call__(
        self, x: torch.Tensor, routing: Routing, bias: torch.Tensor | None, *, is_weighted: bool = False
    ) -> torch.Tensor:
        """``x`` [T, K] or [P, K] to [P, N], or weighted to [A, T, N]."""
        ids, num_experts = routing.expert_ids.flatten(), self._weight.shape[0]
        out = torch.zeros(len(ids), self._weight.shape[1], dtype=x.dtype, device=x.device)
        biases = None if bias is None else bias.view(num_experts, -1)
        for expert in torch.unique(ids[(ids >= 0) & (ids < num_experts)]).tolist():
            pairs = (ids == expert).nonzero().flatten()
            offset = None if biases is None else biases[expert]
            out[pairs] = F.linear(x[pairs % len(x)], self._weight[expert], offset)
        if not is_weighted:
            return out
        return out.view(*routing.weights.shape, -1) * routing.weights[..., None]  # of 16 bits, in float32


class RoundedExperts(ExpertWeight):
    """Weights whose inputs are rounded to FP8 numbers."""

    def __init__(self, weight: ExpertWeight, rounding: Rounding) -> None:
        self._weight, self._rounding = weight, rounding

    def __call__(
        self, x: torch.Tensor, routing: Routing, bias: torch.Tensor | None, *, is_weighted: bool = False
    ) -> torch.Tensor:
        """``x`` [T, K] or [P, K] to [P, N], or weighted to [A, T, N]."""
        rounding = self._rounding
        if rounding.scale is not None and rounding.scale.dim():
            x, scales = of_experts(x, routing, rounding.scale)
            rounding = Rounding(None, scales)
        return self._weight(round_rows(x, rounding), routing, bias, is_weighted=is_weighted)


class ExpertParts(ExpertWeight):
    """Weights of the same experts one after the other, each of which rounds its inputs with scales of its own."""

    def __init__(self, parts: Sequence[ExpertWeight], sizes: Sequence[int], num_experts: int) -> None:
        """``sizes``: rows of an expert in each."""
        self._parts, self._sizes, self._num_experts = parts, list(sizes), num_experts

    def __call__(
        self, x: torch.Tensor, routing: Routing, bias: torch.Tensor | None, *, is_weighted: bool = False
    ) -> torch.Tensor:
        """``x`` [T, K] or [P, K] to [P, N], or weighted to [A, T, N]."""
        parts = zip(self._parts, parts_of_bias(bias, self._sizes, self._num_experts), strict=True)
        return torch.cat([part(x, routing, own, is_weighted=is_weighted) for part, own in parts], -1)


def of_experts(x: torch.Tensor, routing: Routing, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [T, K] or [P, K] with a row for each pair, and of the ``scales`` [E] those of their experts [P, 1]."""
    ids = routing.expert_ids.flatten()
    known = ids.clamp(0, len(scales) - 1)  # others are of experts elsewhere
    return x.repeat(len(ids) // max(1, len(x)), 1), scales[known.long()][:, None]
