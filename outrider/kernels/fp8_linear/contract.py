"""Contract of a prepared FP8 weight: products whose inputs the kernel that computes them may round."""

from __future__ import annotations

import enum

import torch

from outrider.kernels.gemv import NormedInput
from outrider.kernels.linear import PreparedWeight
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
