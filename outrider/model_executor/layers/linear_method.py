"""Linear method: the interface between a linear layer and the format of its weight.

A method says which parameters it is filled through and chooses the kernels; ``linear_methods`` has those that there
are.

Shape letters: ``T`` tokens, ``K`` features in, ``N`` features out, ``A`` partial sums.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from outrider.errors import ConfigError
from outrider.kernels.experts import Routing
from outrider.kernels.rope_and_cache import CosSin, HeadLayout, apply_rope_and_cache
from outrider.kernels.swiglu import geglu, swiglu
from outrider.model_executor.layers.contract import FLOAT_TYPES, Residual


class Axis(enum.Enum):
    """Meaning of a dimension of a linear layer's parameter."""

    OUT = enum.auto()
    """One for each feature that comes out."""
    IN = enum.auto()
    """One for each feature that goes in."""
    ALL_IN = enum.auto()
    """One for each feature that goes in on any rank; the method takes its own."""
    ONE = enum.auto()
    """A single one."""
    EACH = enum.auto()
    """A single one for each tensor that is part of the layer, for all of its rows."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features at one side of a linear layer: as many as the checkpoint has, and those that this rank holds."""

    size: int
    own: range
    name: str = ""
    """Name of the outputs' tensors in the checkpoint, less its last part."""
    order: tuple[int, ...] = ()
    """Order of features in each run of as many, as of a head; empty: that of the checkpoint."""

    @classmethod
    def all(cls, size: int, name: str = "") -> Features:
        """Every rank holds all of them."""
        return cls(size, range(size), name)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a linear layer, to be filled from the checkpoint."""

    tensor: torch.Tensor
    axes: tuple[Axis, ...]
    file_types: tuple[str, ...] = FLOAT_TYPES
    block: tuple[int, ...] = ()
    """Features for which the checkpoint has one value, along each axis; empty: 1."""
    rows: int = 1
    """Features out for which the tensor has one row; they divide the block's."""
    write: Callable[[slice, torch.Tensor], None] | None = None
    """Takes rows of the tensor and their content; None: the content is copied."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Sizes of a linear layer on this rank."""

    inputs: Features
    outputs: tuple[Features, ...]
    """Outputs, one after the other."""
    out_features: int
    """Features of all outputs, and of what rounds them up."""
    has_bias: bool
    dtype: torch.dtype
    device: torch.device
    tied_to: torch.Tensor | None = None
    """The embedding [N, K] that is the weight; it is looked up too, so it stays."""
    module: str = ""
    """Name of the block that the layer is in, as a prefix of its outputs' names."""
    batch_invariant: bool = False
    """True if a row's product must not depend on other rows."""
    num_experts: int = 0
    """Experts whose outputs these are, as many of each; 0: every row meets all outputs."""

    @property
    def in_features(self) -> int:
        """Features that go in on this rank."""
        return len(self.inputs.own)

    def check_arrays(self, multiple: int) -> None:
        """Raise ``ConfigError`` if products must not depend on other rows and the kernels that promise it cannot load
        rows of as many features: they take a ``multiple``. Kernels of experts take any number.
        """
        if self.batch_invariant and not self.num_experts and self.in_features % multiple:
            name = self.module + "/".join(one.name for one in self.outputs)
            raise ConfigError(
                "batch_invariant",
                f"cannot be on: {name} has {self.in_features} columns on each rank, and kernels that keep the order of"
                f" sums take multiples of {multiple}; set it off",
            )

    def empty(self, *size: int) -> torch.Tensor:
        """A parameter of the model's own type, to be filled."""
        return torch.empty(*size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class QueryTarget:
    """Destination of a fused query, key and value product: heads are normalised and rotated, keys and values cached."""

    kv: torch.Tensor  # [S, 2, H_kv, D]
    slots: torch.Tensor  # [T]
    cos_sin: CosSin
    heads: HeadLayout
    norm_weight: torch.Tensor | None  # [H + H_kv, D]; None: heads are not normalised


class LinearMethod(abc.ABC):
    """Storage and product of one linear layer's weight: y = x W^T (+ b).

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

    def grouped(self, x: torch.Tensor, routing: Routing, *, is_weighted: bool = False) -> torch.Tensor:
        """``x`` [T, K], or [A * T, K], by the weights of each token's experts: [A * T, N / E], or weighted
        [A, T, N / E]. Of layers of experts, which compute nothing else.
        """
        raise NotImplementedError

    def of_normed(self, source: Residual, *, may_be_partial: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, K], and the product with it normalised, or partial sums of that."""
        hidden, x = source.normed()
        return hidden, self.partial_sums(x) if may_be_partial else self(x)

    @property
    def takes_gates(self) -> bool:
        """True if ``of_gates`` is there."""
        return False

    def of_gates(self, gate_up: torch.Tensor, *, is_gelu: bool, may_be_partial: bool) -> torch.Tensor:
        """Product with act(gate) * up of ``gate_up`` [T, 2 K], or partial sums of that."""
        raise NotImplementedError

    def gated(self, source: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, K], and silu(gate) * up [T, N / 2] of it normalised; the gate is the product's first half."""
        hidden, product = self.of_normed(source)
        return hidden, swiglu(product)

    def gated_by_gelu(self, source: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """``gated`` with gelu, approximated by tanh, in place of silu."""
        hidden, product = self.of_normed(source)
        return hidden, geglu(product)

    def queries(self, source: Residual, target: QueryTarget) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream [T, K], and the queries [T, H, D] of it normalised; keys and values go to the ``target``."""
        hidden, product = self.of_normed(source, may_be_partial=True)
        return hidden, apply_rope_and_cache(
            product, target.kv, target.slots, target.cos_sin, target.heads, norm_weight=target.norm_weight
        )
