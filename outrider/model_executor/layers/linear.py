"""Linear layers: weights, their shards, and the methods by which they are kept and multiplied with.

A ``Linear`` knows which rows and columns of which tensors of the checkpoint it holds. Its ``LinearMethod`` knows how
they are kept (plain, packed, quantised) and chooses the kernels; ``linear_methods`` has those that there are.

Shape letters: ``T`` tokens, ``K`` features in, ``N`` features out, ``A`` partial sums.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.rope_and_cache import Angles, HeadLayout, turn_and_store
from outrider.kernels.swiglu import swiglu
from outrider.model_executor.layers.contract import FLOAT_TYPES, LayerContext, Residual, Weights, WeightTarget


class Axis(enum.Enum):
    """What a dimension of a linear layer's parameter stands for."""

    OUT = enum.auto()
    """One for each feature that comes out."""
    IN = enum.auto()
    """One for each feature that goes in."""
    ONE = enum.auto()
    """A single one."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a linear layer, to be filled from the checkpoint."""

    tensor: torch.Tensor
    axes: tuple[Axis, ...]
    file_types: tuple[str, ...] = FLOAT_TYPES


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """What a linear layer's method is made for: the features that this rank holds."""

    in_features: int
    out_features: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device
    tied_to: torch.Tensor | None = None
    """The embedding [N, K] that is the weight; it is looked up too, so it stays."""

    def empty(self, *size: int) -> torch.Tensor:
        """A parameter of the model's own type, to be filled."""
        return torch.empty(*size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class QueryTarget:
    """Where a fused query, key and value product ends: heads normalised and turned, keys and values in the cache."""

    kv: torch.Tensor  # [S, 2, H_kv, D]
    slots: torch.Tensor  # [T]
    angles: Angles
    heads: HeadLayout
    norm_weight: torch.Tensor | None  # [H + H_kv, D]; None: heads are not normalised


class LinearMethod(abc.ABC):
    """How one linear layer's weight is kept and multiplied with: y = x W^T (+ b).

    Made empty; filled through ``parameters``; ``prepare`` is called when all of them are there; then it computes. What
    comes before and after a product can be taken over by a method whose kernels do several steps at once; here each is
    a step of its own.
    """

    @abc.abstractmethod
    def parameters(self) -> Mapping[str, Parameter]:
        """The tensors to fill, by the last part of their names: ``weight``, ``bias``, ..."""

    @abc.abstractmethod
    def prepare(self) -> object:
        """Turn what was loaded into the form that computes fastest. Idempotent."""

    @abc.abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""

    def partial_sums(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N], or to float32 [A, T, N] whose sum over A that is."""
        return self(x)

    def gated(self, source: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, K], and silu(gate) * up [T, N / 2] of it normalised; the gate is the product's first half."""
        hidden, x = source.normed()
        return hidden, swiglu(self(x))

    def queries(self, source: Residual, target: QueryTarget) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, K], and the queries [T, H, D] of it normalised; keys and values go to the ``target``."""
        hidden, x = source.normed()
        return hidden, turn_and_store(
            self.partial_sums(x), target.kv, target.slots, target.angles, target.heads, norm_weight=target.norm_weight
        )


@dataclass(frozen=True, slots=True)
class Features:
    """Features at one side of a linear layer: as many as the checkpoint has, and those that this rank holds."""

    size: int
    own: range
    name: str = ""
    """Of outputs: the tensors' name in the checkpoint, less its last part."""

    @classmethod
    def all(cls, size: int, name: str = "") -> Features:
        """Every rank holds all of them."""
        return cls(size, range(size), name)


class Linear:
    """A linear layer. ``outputs`` lie one after the other along the rows of one weight, so that products of one input
    are a single one. Where ranks hold parts of the ``inputs`` each gives a part of a sum, and the first adds the bias.
    """

    def __init__(
        self,
        context: LayerContext,
        inputs: Features,
        outputs: Sequence[Features],
        *,
        bias: bool = False,
        num_rows: int | None = None,
        tied_to: torch.Tensor | None = None,
    ) -> None:
        """``num_rows`` rounds the outputs up, with zeros; ``tied_to`` is an embedding that is the weight."""
        self._inputs, self._outputs, self._has_bias = inputs, tuple(outputs), bias
        held = sum(len(features.own) for features in outputs)
        adds_bias = bias and (len(inputs.own) == inputs.size or context.ranks.shard.rank == 0)
        self.method = context.linear_method(
            LinearSpec(len(inputs.own), num_rows or held, adds_bias, context.dtype, context.device, tied_to)
        )
        for parameter in self.method.parameters().values() if num_rows else ():
            parameter.tensor[held:].zero_()
        self._is_alone = context.is_alone

    def weights(self, prefix: str = "") -> Weights:
        """Each output's tensors."""
        parameters, start = self.method.parameters(), 0
        for features in self._outputs:
            end = start + len(features.own)
            for name, parameter in parameters.items():
                yield f"{prefix}{features.name}.{name}", self._target(parameter, features, start)
            if self._has_bias and "bias" not in parameters:
                yield f"{prefix}{features.name}.bias", WeightTarget(None, (features.size,))
            start = end

    def prepare(self) -> object:
        """Make ready to compute."""
        return self.method.prepare()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to [T, N]."""
        return self.method(x)

    def to_residual(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] to what is to be added to the residual stream: the rank's part [T, N] of a sum, or, of one rank
        alone, partial sums [A, T, N] of it.
        """
        return self.method.partial_sums(x) if self._is_alone else self.method(x)

    def _target(self, parameter: Parameter, features: Features, start: int) -> WeightTarget:
        """``features``' part of a parameter, whose rows begin at ``start``."""
        sizes = {Axis.OUT: features.size, Axis.IN: self._inputs.size, Axis.ONE: 1}
        owned = {Axis.OUT: features.own, Axis.IN: self._inputs.own, Axis.ONE: range(1)}
        rows = tuple(
            slice(start, start + len(features.own)) if axis is Axis.OUT else slice(None) for axis in parameter.axes
        )
        part = tuple(slice(owned[axis].start, owned[axis].stop) for axis in parameter.axes)
        shape = tuple(sizes[axis] for axis in parameter.axes)
        return WeightTarget(parameter.tensor[rows], shape, part, self, parameter.file_types)
