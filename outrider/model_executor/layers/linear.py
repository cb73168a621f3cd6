"""Linear layers: which rows and columns of which tensors of the checkpoint a rank holds.

How they are kept (plain, packed, quantised) and which kernels multiply with them is the layer's ``LinearMethod``'s.

Shape letters: ``T`` tokens, ``K`` features in, ``N`` features out, ``A`` partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Weights, WeightTarget
from outrider.model_executor.layers.linear_method import Axis, LinearSpec, Parameter


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
        adds_bias = bias and (len(inputs.own) == inputs.size or context.communicator.shard.rank == 0)
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
