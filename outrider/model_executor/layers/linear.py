"""Linear layers: which rows and columns of which tensors of the checkpoint a rank holds.

How they are kept (plain, packed, quantised) and which kernels multiply with them is the layer's ``LinearMethod``'s.

Shape letters: ``T`` tokens, ``K`` features in, ``N`` features out, ``A`` partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from outrider.errors import ModelError
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Weights, WeightTarget
from outrider.model_executor.layers.linear_method import Axis, Features, LinearMethod, LinearSpec, Parameter


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
        module: str = "",
        num_experts: int = 0,
        make_method: Callable[[LinearSpec], LinearMethod] | None = None,
    ) -> None:
        """``num_rows`` rounds the outputs up, with zeros; ``tied_to`` is an embedding that is the weight; ``module`` is
        the prefix of the outputs' names in the whole model; ``num_experts`` share the outputs; ``make_method`` makes
        another method than the model's.
        """
        self._inputs, self._outputs, self._has_bias = inputs, tuple(outputs), bias
        held = sum(len(features.own) for features in outputs)
        adds_bias = bias and (len(inputs.own) == inputs.size or context.communicator.shard.rank == 0)
        self.method = (make_method or context.linear_method)(
            LinearSpec(
                inputs,
                self._outputs,
                num_rows or held,
                adds_bias,
                context.dtype,
                context.device,
                tied_to,
                module,
                context.batch_invariant,
                num_experts,
            )
        )
        for parameter in self.method.parameters().values() if num_rows else ():
            parameter.tensor[-(-held // parameter.rows) :].zero_()
        # What is normalized before it is added to the residual stream is needed whole.
        self._may_be_partial = context.is_alone and not context.config.variant.norms.has_after

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
        return self.method.partial_sums(x) if self._may_be_partial else self.method(x)

    def gates_to_residual(self, gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
        """The same of act(gate) * up, for ``gate_up`` [T, 2 K]; of methods that take gates."""
        return self.method.of_gates(gate_up, is_gelu=is_gelu, may_be_partial=self._may_be_partial)

    def _target(self, parameter: Parameter, features: Features, start: int) -> WeightTarget:
        """``features``' part of a parameter, whose rows begin at ``start``."""
        one = Features.all(1)
        sides = {
            Axis.OUT: features,
            Axis.IN: self._inputs,
            Axis.ALL_IN: Features.all(self._inputs.size),
            Axis.ONE: one,
            Axis.EACH: one,
        }
        blocks = parameter.block or (1,) * len(parameter.axes)
        shape, part = [], []
        for axis, block in zip(parameter.axes, blocks, strict=True):
            side = sides[axis]
            shape.append(-(-side.size // block))
            part.append(slice(side.own.start // block, -(-side.own.stop // block)))
        rows = slice(None)
        if parameter.axes[0] in (Axis.OUT, Axis.EACH):
            rows = slice(start // parameter.rows, -(-(start + len(features.own)) // parameter.rows))
        return WeightTarget(
            parameter.tensor[rows], tuple(shape), tuple(part), self, parameter.file_types,
            _ordered(_writer(parameter, rows, features.own, blocks[0]), parameter, rows, features, blocks[0]),
        )  # fmt: skip


def _writer(parameter: Parameter, rows: slice, own: range, block: int) -> Callable[[torch.Tensor], object] | None:
    """Function that writes content to ``rows`` of the parameter; None: it is copied."""
    if parameter.write is not None:
        return partial(parameter.write, rows)
    if block == parameter.rows:
        return None
    source = torch.arange(own.start, own.stop, parameter.rows) // block - own.start // block
    return lambda content: parameter.tensor[rows].copy_(content.index_select(0, source.to(content.device)))


def _ordered(
    writer: Callable[[torch.Tensor], object] | None, parameter: Parameter, rows: slice, features: Features, block: int
) -> Callable[[torch.Tensor], object] | None:
    """A writer that first brings content into the order of the features."""
    size = len(features.order)
    if not size or parameter.axes[0] is not Axis.OUT or (block > 1 and block % size == 0):
        return writer
    if block > 1:
        raise ModelError(f"{features.name}: heads of {size} features do not lie whole in blocks of {block} rows")
    write, order = writer or parameter.tensor[rows].copy_, list(features.order)
    return lambda content: write(content.reshape(-1, size, *content.shape[1:])[:, order].flatten(0, 1))
