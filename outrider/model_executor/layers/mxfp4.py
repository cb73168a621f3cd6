"""Experts whose weights are MXFP4: FP4 numbers (E2M1), two to a byte, and a power of two for each 32 columns of a row.

Inputs are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.errors import ModelError
from outrider.kernels.experts import ExpertWeight, Mxfp4Matrix, Routing, prepare_mxfp4_experts
from outrider.model_executor.layers.linear_method import Axis, LinearMethod, LinearSpec, Parameter
from outrider.model_executor.layers.quantization import MXFP4_GROUP

MXFP4_NUMBERS = ".blocks"
"""Last part of the names of the numbers."""
_FILE_TYPES = ("U8",)


class Mxfp4Experts(LinearMethod):
    """Weights of all experts of a layer."""

    def __init__(self, spec: LinearSpec) -> None:
        num_rows, size = spec.out_features, spec.in_features
        if spec.inputs.size % MXFP4_GROUP or not spec.num_experts:
            raise ModelError(
                f"{spec.module}{spec.outputs[0].name} has no whole groups of {MXFP4_GROUP} columns (mxfp4)"
            )
        self._spec = spec
        self._numbers = torch.empty(num_rows, size // 2, dtype=torch.uint8, device=spec.device)
        self._scales = torch.empty(num_rows, size // MXFP4_GROUP, dtype=torch.uint8, device=spec.device)
        self.bias = spec.empty(num_rows) if spec.has_bias else None
        self._prepared: ExpertWeight | None = None

    def parameters(self) -> Mapping[str, Parameter]:
        """Numbers, scales and bias."""
        found = {
            "blocks": Parameter(self._numbers, (Axis.OUT, Axis.IN), _FILE_TYPES, block=(1, 2)),
            "scales": Parameter(self._scales, (Axis.OUT, Axis.IN), _FILE_TYPES, block=(1, MXFP4_GROUP)),
        }
        return found if self.bias is None else {**found, "bias": Parameter(self.bias, (Axis.OUT,))}

    def prepare(self) -> ExpertWeight:
        """Release what was loaded."""
        if self._prepared is None:
            matrix = Mxfp4Matrix(self._numbers, self._scales)
            self._prepared = prepare_mxfp4_experts(matrix, self._spec.num_experts, self._spec.dtype)
            self._numbers = self._scales = torch.empty(0)
        return self._prepared

    def grouped(self, x: torch.Tensor, routing: Routing, *, is_weighted: bool = False) -> torch.Tensor:
        """Products with the weights of each token's experts."""
        return (self._prepared or self.prepare())(x, routing, self.bias, is_weighted=is_weighted)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Refused: these are no experts of a layer."""
        raise NotImplementedError
