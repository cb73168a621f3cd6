"""Linear methods: the ways in which linear layers keep their weights, by the name that a checkpoint gives them.

A new format is a new ``LinearMethod`` that ``linear_method_of`` chooses; layers, loader and model stay as they are.

Shape letters: ``T`` tokens, ``K`` features in, ``N`` features out, ``A`` partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from outrider.kernels.experts import ExpertWeight, Routing, prepare_experts
from outrider.kernels.gemv import Matrix
from outrider.kernels.linear import PreparedWeight, prepare_weight
from outrider.model_executor.layers.contract import Residual
from outrider.model_executor.layers.fp8 import Fp8Linear
from outrider.model_executor.layers.linear_method import Axis, LinearMethod, LinearSpec, Parameter, QueryTarget
from outrider.model_executor.layers.mxfp4 import Mxfp4Experts
from outrider.model_executor.layers.quantization import Numbers, Quantization

_MAX_SECOND_COPY_BYTES = 64 << 20
"""Largest weight of which a second copy in another layout is kept."""
_COLUMNS_OF_KERNELS = 8
"""Granularity of columns of 16 bits, since TMA loads rows by 16 bytes."""


class UnquantizedLinear(LinearMethod):
    """Weight in the model's own type, prepared as is fastest on its device."""

    def __init__(self, spec: LinearSpec) -> None:
        spec.check_arrays(_COLUMNS_OF_KERNELS)
        tied = spec.tied_to
        self.weight = spec.empty(spec.out_features, spec.in_features) if tied is None else tied
        """[N, K]; of no use once prepared."""
        self.bias = spec.empty(spec.out_features) if spec.has_bias else None
        self._batch_invariant, self._num_experts = spec.batch_invariant, spec.num_experts
        self._keeps_layout = tied is not None and tied.nbytes > _MAX_SECOND_COPY_BYTES
        self._prepared: PreparedWeight | None = None
        self._experts: ExpertWeight | None = None

    def parameters(self) -> Mapping[str, Parameter]:
        """Weight and bias."""
        weight = {"weight": Parameter(self.weight, (Axis.OUT, Axis.IN))}
        return weight if self.bias is None else {**weight, "bias": Parameter(self.bias, (Axis.OUT,))}

    def prepare(self) -> object:
        """Let go of the loaded weight. A large tied one is not copied: it is still needed to look up rows."""
        return self._prepare_experts() if self._num_experts else self._prepare()

    def _prepare(self) -> PreparedWeight:
        if self._prepared is None:
            self._prepared = prepare_weight(
                self.weight, keep_layout=self._keeps_layout, batch_invariant=self._batch_invariant
            )
            self.weight = torch.empty(0)
        return self._prepared

    def _prepare_experts(self) -> ExpertWeight:
        if self._experts is None:
            self._experts = prepare_experts(self.weight, self._num_experts)
            self.weight = torch.empty(0)
        return self._experts

    def grouped(self, x: torch.Tensor, routing: Routing, *, is_weighted: bool = False) -> torch.Tensor:
        """Products with the weights of each token's experts."""
        return (self._experts or self._prepare_experts())(x, routing, self.bias, is_weighted=is_weighted)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        return (self._prepared or self._prepare())(x, self.bias)

    def partial_sums(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 [A, T, N] whose sum over A that is."""
        return (self._prepared or self._prepare()).partials(x, self.bias)

    def gated(self, source: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """Gated product, in one kernel for few tokens; for some tokens the product and the gate in one."""
        matrix, few = self._matrix, source.unnormed_few()
        if matrix is not None and few is not None:
            from outrider.kernels.gemv.kernel import gated  # Triton is slow to import

            return gated(few, matrix)
        hidden, x = source.normed()
        return hidden, (self._prepared or self._prepare()).gated(x, self.bias)

    def queries(self, source: Residual, target: QueryTarget) -> tuple[torch.Tensor, torch.Tensor]:
        """Query product, in one kernel for few tokens whose heads are not normalised."""
        matrix, few = self._matrix, source.unnormed_few()
        if matrix is None or few is None or target.norm_weight is not None:
            return super().queries(source, target)
        from outrider.kernels.gemv.kernel import qkv_with_rope  # Triton is slow to import

        return qkv_with_rope(few, matrix, target.kv, target.slots, cos_sin=target.cos_sin, heads=target.heads)

    @property
    def _matrix(self) -> Matrix | None:
        """Weight and bias for kernels that take several steps at once; None where they are not to be had."""
        weight = (self._prepared or self._prepare()).matrix
        return None if weight is None else Matrix(weight, self.bias)


def linear_method_of(quantization: Quantization | None) -> Callable[[LinearSpec], LinearMethod]:
    """The method of each linear layer of a model, by its name; a head that is an embedding keeps the model's type."""
    if quantization is None:
        return UnquantizedLinear

    def choose(spec: LinearSpec) -> LinearMethod:
        is_covered = spec.tied_to is None and quantization.covers([spec.module + one.name for one in spec.outputs])
        if not is_covered:
            return UnquantizedLinear(spec)
        return Mxfp4Experts(spec) if quantization.numbers is Numbers.MXFP4 else Fp8Linear(quantization, spec)

    return choose
