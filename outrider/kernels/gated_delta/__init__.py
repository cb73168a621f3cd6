"""Gated DeltaNet (Yang et al., 2024): a causal convolution and the gated delta rule over states in slots.

A head's state S [K, V] follows its tokens: S = exp(g) S; S += k (b (v - k^T S))^T; the output is q^T S. Queries, keys
and values come from a depthwise convolution over the last tokens and silu; queries and keys have length 1.

Contract: ``gated_delta`` takes the inputs ``[T, N]`` of each row's tokens. A row's slot has the state after ``starts``
tokens and a log of the inputs of those after them, and of those before them that the convolution reads. The tokens from
``starts`` on are replayed from the log, the row's own tokens follow, and the outputs of these ``[T, H, V]`` are
returned, float32. The slot then has the state after ``ends`` tokens, and its log the inputs of the row's last tokens.
Where ``starts`` is 0 the state is 0, whatever the slot holds. ``ends`` is at most a log before a row's last token, so
that it is among the own tokens of a row that has more than the log holds. A state is float32, and is the same after a
token however tokens were divided among forwards: up to rounding, and of kernels bit for bit if no row goes in chunks.
"""

from __future__ import annotations

import torch

from outrider.kernels.gated_delta import reference
from outrider.kernels.gated_delta.layout import DeltaRows, DeltaShape, DeltaSlots, DeltaWeights
from outrider.kernels.launching import has_kernels

__all__ = ["DeltaRows", "DeltaShape", "DeltaSlots", "DeltaWeights", "gated_delta", "gated_norm"]


def gated_delta(
    inputs: torch.Tensor,
    slots: DeltaSlots,
    rows: DeltaRows,
    weights: DeltaWeights,
    shape: DeltaShape,
) -> torch.Tensor:
    """``inputs`` [T, N] of the rows' tokens over the states in ``slots``: [T, H, V] float32."""
    if has_kernels(inputs.device):
        from outrider.kernels.gated_delta import kernel  # Triton is slow to import

        return kernel.gated_delta(inputs, slots, rows, weights, shape)
    return reference.gated_delta(inputs, slots, rows, weights, shape)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, rows: DeltaRows) -> torch.Tensor:
    """``x`` [T, H, V] normalised over V, times ``weight`` [V] and silu of ``gate`` [T, H V], whose rows may lie apart:
    of the gate's type. 0 for tokens without a row.
    """
    if has_kernels(x.device):
        from outrider.kernels.gated_delta import kernel  # Triton is slow to import

        return kernel.gated_norm(x, gate, weight, eps, rows)
    return reference.gated_norm(x, gate.reshape(x.shape), weight, eps)
