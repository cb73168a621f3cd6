"""Linear layers whose weights are FP8 numbers (E4M3) with scales, as published or made while loading.

Owns the parameters of each format. Scales are stored per row, or per as many rows as a block has on every rank, so that
tensors with scales of their own lie in one weight. How inputs are rounded is the format's, never their number's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from outrider.errors import ConfigError
from outrider.kernels.experts import ExpertWeight, Routing, prepare_fp8_experts
from outrider.kernels.fp8_linear import (
    FP8,
    Fp8Matrix,
    Gate,
    PreparedFp8Weight,
    Rounding,
    prepare_fp8_weight,
    quantize_rows,
)  # fmt: skip
from outrider.model_executor.layers.contract import Residual
from outrider.model_executor.layers.linear_method import Axis, LinearMethod, LinearSpec, Parameter
from outrider.model_executor.layers.quantization import Activations, Quantization, Scales

_COLUMNS_OF_KERNELS = 16
_FILE_TYPES = ("F8_E4M3",)
_SCALE_AXES = {
    Scales.TENSOR: (Axis.EACH,),
    Scales.CHANNEL: (Axis.OUT, Axis.ONE),
    Scales.BLOCK: (Axis.OUT, Axis.IN),
}


class Fp8Linear(LinearMethod):
    """FP8 weight with a scale for each tensor, row or block."""

    def __init__(self, quantization: Quantization, spec: LinearSpec) -> None:
        spec.check_arrays(_COLUMNS_OF_KERNELS)  # others are widened, for a library's products
        self._format, self._spec = quantization, spec
        num_rows, size = spec.out_features, spec.in_features
        self._rows, self._arrays = _scaled_rows(quantization, spec), size
        if quantization.weights is Scales.BLOCK:
            self._arrays = quantization.block[1]
            _check_blocks(self._arrays, spec)
        self._numbers = torch.empty(num_rows, size, dtype=FP8, device=spec.device)
        scales = (-(-num_rows // self._rows), -(-size // self._arrays))
        self._scales = torch.zeros(scales, dtype=torch.float32, device=spec.device)
        self._input_scales = torch.zeros(num_rows, dtype=torch.float32, device=spec.device)
        self.bias = spec.empty(num_rows) if spec.has_bias else None
        self._prepared: PreparedFp8Weight | None = None
        self._experts: ExpertWeight | None = None

    def parameters(self) -> Mapping[str, Parameter]:
        """Weight, bias, and the scales that the checkpoint has."""
        found = {} if self.bias is None else {"bias": Parameter(self.bias, (Axis.OUT,))}
        if self._format.is_online:
            return {"weight": Parameter(self._numbers, (Axis.OUT, Axis.ALL_IN), write=self._quantize), **found}
        found["weight"] = Parameter(self._numbers, (Axis.OUT, Axis.IN), _FILE_TYPES)
        found[self._format.scale_name] = self._scale_parameter()
        if self._format.activations is Activations.STATIC:
            found["input_scale"] = Parameter(self._input_scales, (Axis.EACH,))
        return found

    def prepare(self) -> object:
        """Release what was loaded."""
        return self._prepare_experts() if self._spec.num_experts else self._prepare()

    def _prepare(self) -> PreparedFp8Weight:
        if self._prepared is None:
            self._prepared = prepare_fp8_weight(
                self._matrix(), self._rounding(), self._spec.dtype, batch_invariant=self._spec.batch_invariant
            )
            self._release()
        return self._prepared

    def _prepare_experts(self) -> ExpertWeight:
        if self._experts is None:
            count, rounding = self._spec.num_experts, self._rounding()
            self._experts = prepare_fp8_experts(self._matrix(), rounding, count, self._spec.dtype)
            self._release()
        return self._experts

    def _matrix(self) -> Fp8Matrix:
        return Fp8Matrix(self._numbers, self._scales, self._rows, self._arrays)

    def _release(self) -> None:
        self._numbers = self._scales = torch.empty(0, 1)  # whose parts can still be named
        self._input_scales = torch.empty(0)

    def grouped(self, x: torch.Tensor, routing: Routing, *, is_weighted: bool = False) -> torch.Tensor:
        """Products with the weights of each token's experts."""
        return (self._experts or self._prepare_experts())(x, routing, self.bias, is_weighted=is_weighted)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        return (self._prepared or self._prepare())(x, self.bias)

    def partial_sums(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 [A, T, N] whose sum over A that is; the latter depends on T."""
        if self._spec.batch_invariant:
            return self(x)
        return (self._prepared or self._prepare()).partials(x, self.bias)

    def of_normed(self, source: Residual, *, may_be_partial: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm's kernel rounds, where no ranks' parts are added before."""
        weight, given = self._prepared or self._prepare(), source.unnormed()
        if given is None or not weight.rounds_normed:
            return super().of_normed(source, may_be_partial=may_be_partial)
        may_be_partial = may_be_partial and not self._spec.batch_invariant
        return given.hidden, weight.of_normed(given, self.bias, may_be_partial=may_be_partial)

    @property
    def takes_gates(self) -> bool:
        """The gate's kernel rounds."""
        return True

    def of_gates(self, gate_up: torch.Tensor, *, is_gelu: bool, may_be_partial: bool) -> torch.Tensor:
        """See ``LinearMethod``."""
        gate = Gate.GELU if is_gelu else Gate.SILU
        may_be_partial = may_be_partial and not self._spec.batch_invariant
        weight = self._prepared or self._prepare()
        return weight.of_gates(gate_up, self.bias, gate=gate, may_be_partial=may_be_partial)

    def _scale_parameter(self) -> Parameter:
        weights, block = self._format.weights, self._format.block if self._format.weights is Scales.BLOCK else ()
        tensor = self._scales[:, 0] if weights is Scales.TENSOR else self._scales
        return Parameter(tensor, _SCALE_AXES[weights], block=block, rows=self._rows)

    def _rounding(self) -> Rounding:
        match self._format.activations:
            case Activations.TOKEN:
                return Rounding(self._spec.in_features)
            case Activations.GROUP:
                return Rounding(self._format.block[1])
            case Activations.STATIC:
                held = sum(len(features.own) for features in self._spec.outputs)
                self._input_scales[held:] = self._input_scales[held - 1]
                return Rounding(None, self._input_scales)
            case Activations.UNCHANGED:
                return Rounding(None)

    def _quantize(self, rows: slice, content: torch.Tensor) -> None:
        """Fill ``rows`` from ``content`` [n, K] of all ranks, so that scales do not depend on the number of ranks."""
        numbers, scales = quantize_rows(content.to(self._spec.device))
        own = self._spec.inputs.own
        self._numbers[rows] = numbers[:, own.start : own.stop]
        self._scales[rows] = scales


def _scaled_rows(quantization: Quantization, spec: LinearSpec) -> int:
    """Rows of the layer that share a scale: of a block, as many as no tensor or rank begins within."""
    if quantization.weights is not Scales.BLOCK:
        return 1
    starts, end = [], 0
    for features in spec.outputs:
        starts += [end, features.own.start]
        end += len(features.own)
    return math.gcd(quantization.block[0], *starts)


def _check_blocks(columns: int, spec: LinearSpec) -> None:
    """Raise ``ConfigError`` if a rank's columns begin within a block, whose inputs are rounded together."""
    if spec.inputs.own.start % columns or (spec.inputs.own.stop % columns and spec.inputs.own.stop < spec.inputs.size):
        name = spec.module + "/".join(one.name for one in spec.outputs)
        raise ConfigError(
            "tensor_parallel_size",
            f"{name} has {spec.inputs.size} columns in blocks of {columns}, which as many ranks cannot share whole",
        )
