"""PyTorch reference of ``fp8_linear``; runs on every device."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from outrider.kernels.fp8_linear.layout import FP8, FP8_MAX, Fp8Matrix, Rounding, rounded_scale
from outrider.kernels.gemv import NormedInput
from outrider.kernels.linear import PreparedWeight, prepare_weight
from outrider.kernels.swiglu import geglu, swiglu


class Gate(enum.Enum):
    """Function of gates [T, K] and ups [T, K], which lie beside each other, that gives a product's input."""

    SILU = "silu"
    GELU = "gelu"


class PreparedFp8Weight(PreparedWeight):
    """An FP8 weight that is ready for products. The numbers are those of a separate norm or gate before it."""

    rounds_normed = False
    """True if ``of_normed`` is there."""

    def of_normed(self, source: NormedInput, bias: torch.Tensor | None, *, may_be_partial: bool) -> torch.Tensor:
        """Product with the norm of ``source``, whose sum is written over its stream. See ``partials``."""
        raise NotImplementedError

    def of_gates(
        self, gate_up: torch.Tensor, bias: torch.Tensor | None, *, gate: Gate, may_be_partial: bool
    ) -> torch.Tensor:
        """Product with what the ``gate`` gives of ``gate_up`` [T, 2 K]. See ``partials``."""
        x = geglu(gate_up) if gate is Gate.GELU else swiglu(gate_up)
        return self.partials(x, bias) if may_be_partial else self(x, bias)


class Fp8Parts(PreparedFp8Weight):
    """Weights one after the other, each of which rounds its inputs with a scale of its own."""

    def __init__(self, parts: Sequence[PreparedFp8Weight], sizes: Sequence[int]) -> None:
        """``sizes``: rows of each."""
        self._parts, self._sizes = parts, list(sizes)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        biases = parts_of_bias(bias, self._sizes)
        return torch.cat([part(x, own) for part, own in zip(self._parts, biases, strict=True)], 1)


def parts_of_bias(
    bias: torch.Tensor | None, sizes: Sequence[int], num_experts: int = 1
) -> Sequence[torch.Tensor | None]:
    """Biases of parts of as many rows of each expert, cut from that of all [experts * rows]."""
    if bias is None:
        return [None] * len(sizes)
    return [own.flatten() for own in torch.split(bias.view(num_experts, -1), list(sizes), 1)]


class WidenedWeight(PreparedFp8Weight):
    """The weight in the type of its inputs, which are rounded to FP8 numbers."""

    def __init__(self, matrix: Fp8Matrix, rounding: Rounding, dtype: torch.dtype) -> None:
        self._rounding = rounding
        self._weight = prepare_weight(widened(matrix, dtype))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        return self._weight(round_rows(x, self._rounding), bias)


def widened(matrix: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in ``dtype``; computed in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    num_rows, size = matrix.numbers.shape
    scales = matrix.scales.to(wide).repeat_interleave(matrix.rows, 0)[:num_rows]
    if matrix.columns < size:
        scales = scales.repeat_interleave(matrix.columns, 1)[:, :size]
    return (matrix.numbers.to(wide) * scales).to(dtype)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [N, K] as FP8 numbers [N, K] and a scale for each row [N, 1]."""
    wide = weight.float()
    scales = rounded_scale(wide.abs().amax(1, keepdim=True))
    return _numbers(wide / scales), scales


def round_rows(x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """``x`` [T, K] with every value rounded to the nearest FP8 number times its scale, in the type of ``x``."""
    if rounding.group is None and rounding.scale is None:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if rounding.scale is not None:
        scale = rounding.scale.to(wide)
        return (_numbers(wide / scale).to(wide.dtype) * scale).to(x.dtype)
    size, group = x.shape[1], rounding.group or x.shape[1]
    groups = F.pad(wide, (0, -size % group)).view(x.shape[0], -(-size // group), group)
    scales = rounded_scale(groups.abs().amax(2, keepdim=True))
    rounded = _numbers(groups / scales).to(wide.dtype) * scales
    return rounded.flatten(1)[:, :size].to(x.dtype)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
