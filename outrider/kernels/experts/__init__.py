"""Routing of tokens to experts (mixture of experts, MoE), and products with the weights of each token's experts
(grouped GEMM).

Contract: ``route`` takes a router's logits ``[T, E]`` and gives the ``Routing``: the A experts of each token with the
largest softmax, or the largest sigmoid by ``SigmoidScores``. ``prepare_experts`` and its forms for FP8 and MXFP4 take
the weights of all experts, one after the other, and give an ``ExpertWeight``: ``(x [T, K] or [A * T, K], routing, bias)
-> [A * T, N]``, in which the row of token t and its a-th expert is a * T + t. Weighted products [A, T, N] are what
remains to be added up.

On a GPU nothing waits for the host: pairs of tokens and experts are sorted into tiles whose number follows from the
number of tokens alone. A row has the same bits with any other rows, at any place in a tile: columns are summed from the
first to the last on one instruction shape, and a token's experts are added by falling weight. So products with experts
are batch-invariant in any mode, if the router's are.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.kernels.experts import reference
from outrider.kernels.experts.layout import ExpertWeight, Mxfp4Matrix, Routing, SigmoidScores
from outrider.kernels.experts.reference import ExpertParts, PlainExperts, RoundedExperts, widened_mxfp4
from outrider.kernels.fp8_linear import Fp8Matrix, Rounding
from outrider.kernels.fp8_linear.layout import alike_parts
from outrider.kernels.fp8_linear.reference import widened
from outrider.kernels.launching import has_kernels

__all__ = [
    "ExpertWeight", "Mxfp4Matrix", "Routing", "SigmoidScores", "part_of", "prepare_experts", "prepare_fp8_experts",
    "prepare_mxfp4_experts", "route", "sum_experts",
]  # fmt: skip


def route(logits: torch.Tensor, num_chosen: int, *, normalizes: bool, scores: SigmoidScores | None = None) -> Routing:
    """The ``num_chosen`` most probable experts of each token by ``logits`` [T, E], weighted by their probabilities, or
    by ``scores``; ``normalizes``: the weights of a token's experts add up to 1, before they are scaled.
    """
    if has_kernels(logits.device):
        from outrider.kernels.experts import kernel, routing  # Triton is slow to import

        width = kernel.tiling_of(logits.shape[0] * num_chosen, logits.shape[1]).width
        return routing.route(logits, num_chosen, normalizes=normalizes, width=width, scores=scores)
    return reference.route(logits, num_chosen, normalizes=normalizes, scores=scores)


def part_of(routing: Routing, held: range) -> Routing:
    """The routing to some neighbouring experts, counted from the first of them (expert parallelism)."""
    ids, tiles = routing.expert_ids - held.start, routing.tiles
    if tiles is not None:
        experts = tiles.tiles[:, 0] - held.start
        is_held = (experts >= 0) & (experts < len(held))
        parts = torch.where(is_held, experts, 0), tiles.tiles[:, 1], torch.where(is_held, tiles.tiles[:, 2], 0)
        tiles = replace(tiles, tiles=torch.stack(parts, dim=1))
    return Routing(ids, routing.weights, tiles, is_partial=True)


def sum_experts(products: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``products`` [A, T, N] of tokens' experts added up: [T, N] of ``dtype``."""
    if has_kernels(products.device):
        from outrider.kernels.linear.split_k import sum_partials  # Triton is slow to import

        return sum_partials(products, None, dtype)
    return reference.sum_experts(products, dtype)


def prepare_experts(weight: torch.Tensor, num_experts: int) -> ExpertWeight:
    """The form of ``weight`` [E * N, K] that computes fastest on its device."""
    if has_kernels(weight.device):
        from outrider.kernels.experts.kernel import TritonExperts  # Triton is slow to import

        return TritonExperts(weight, num_experts)
    return PlainExperts(weight.view(num_experts, -1, weight.shape[1]))


def prepare_fp8_experts(matrix: Fp8Matrix, rounding: Rounding, num_experts: int, dtype: torch.dtype) -> ExpertWeight:
    """The same of FP8 numbers [E * N, K], for inputs of ``dtype`` that are rounded as the ``rounding`` says."""
    cut = list(alike_parts(matrix, rounding, num_experts))
    parts = [_prepared_fp8(*part, num_experts, dtype) for part in cut]
    sizes = [len(part.numbers) // num_experts for part, _ in cut]
    return parts[0] if len(parts) == 1 else ExpertParts(parts, sizes, num_experts)


def _prepared_fp8(matrix: Fp8Matrix, rounding: Rounding, num_experts: int, dtype: torch.dtype) -> ExpertWeight:
    """Form of a weight with one scale of each expert's inputs, if that is given."""
    if has_kernels(matrix.numbers.device):
        from outrider.kernels.experts.kernel import TritonExperts  # Triton is slow to import
        from outrider.kernels.fp8_linear.weight import takes

        if takes(matrix, rounding):
            return TritonExperts(matrix, num_experts, rounding)
        return RoundedExperts(TritonExperts(widened(matrix, dtype), num_experts), rounding)
    weight = widened(matrix, dtype)
    return RoundedExperts(PlainExperts(weight.view(num_experts, -1, weight.shape[1])), rounding)


def prepare_mxfp4_experts(matrix: Mxfp4Matrix, num_experts: int, dtype: torch.dtype) -> ExpertWeight:
    """The same of FP4 numbers [E * N, K], for inputs of ``dtype``, which are not rounded. Kernels widen the numbers in
    registers for inputs of 16 bits; otherwise the weight is widened.
    """
    if has_kernels(matrix.numbers.device) and dtype.itemsize == 2:
        from outrider.kernels.experts.kernel import TritonExperts  # Triton is slow to import

        return TritonExperts(matrix, num_experts)
    return prepare_experts(widened_mxfp4(matrix, dtype), num_experts)
