"""A linear layer with a method of its own: what is loaded, who holds which part, and what ranks add up to."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Residual
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Axis, Features, LinearMethod, LinearSpec, Parameter
from outrider.model_executor.layers.linear_methods import UnquantizedLinear
from outrider.model_executor.layers.norm import RmsNorm
from outrider.model_executor.models.config import LLAMA

IN, FIRST, SECOND = 6, 4, 8
CPU = torch.device("cpu")


class ScaledLinear(LinearMethod):
    """Whole numbers with one scale for each feature out, as quantised weights have."""

    def __init__(self, spec: LinearSpec) -> None:
        self.numbers = torch.empty(spec.out_features, spec.in_features, dtype=torch.int8)
        self.scale = spec.empty(spec.out_features, 1)
        self.bias = spec.empty(spec.out_features) if spec.has_bias else None
        self.num_prepared = 0

    def parameters(self) -> Mapping[str, Parameter]:
        found = {
            "weight": Parameter(self.numbers, (Axis.OUT, Axis.IN), ("I8",)),
            "weight_scale": Parameter(self.scale, (Axis.OUT, Axis.ONE)),
        }
        return found if self.bias is None else {**found, "bias": Parameter(self.bias, (Axis.OUT,))}

    def prepare(self) -> None:
        self.num_prepared += 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.numbers * self.scale, self.bias)


def context_of(rank: int, size: int, method: Any = ScaledLinear) -> LayerContext:
    ranks: Any = SimpleNamespace(shard=Shard(rank, size))
    config: Any = SimpleNamespace(variant=LLAMA)
    return LayerContext(config, config, torch.float32, CPU, ranks, method)


def checkpoint(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name.replace("__", "."): torch.randint(-9, 9, shape, generator=generator).float()
        for name, shape in shapes.items()
    }


def fill(layer: Linear, tensors: dict[str, torch.Tensor]) -> Linear:
    targets = dict(layer.weights())
    assert targets.keys() == tensors.keys()
    for name, target in targets.items():
        assert target.shape == tensors[name].shape
        if target.destination is not None:
            target.write(tensors[name] if target.part is None else tensors[name][target.part])
    return layer


COLUMNS = checkpoint(
    a__weight=(FIRST, IN), a__weight_scale=(FIRST, 1), a__bias=(FIRST,),
    b__weight=(SECOND, IN), b__weight_scale=(SECOND, 1), b__bias=(SECOND,),
)  # fmt: skip
ROWS = checkpoint(c__weight=(SECOND, IN), c__weight_scale=(SECOND, 1), c__bias=(SECOND,))


def half(size: int, rank: int, num_ranks: int) -> range:
    each = size // num_ranks
    return range(rank * each, (rank + 1) * each)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_outputs_that_ranks_share_lie_one_after_the_other(num_ranks: int) -> None:
    x = torch.randn(3, IN)
    whole = {name: (COLUMNS[f"{name}.weight"] * COLUMNS[f"{name}.weight_scale"]) for name in "ab"}
    for rank in range(num_ranks):
        own = {"a": half(FIRST, rank, num_ranks), "b": half(SECOND, rank, num_ranks)}
        outputs = (Features(FIRST, own["a"], "a"), Features(SECOND, own["b"], "b"))
        layer = fill(Linear(context_of(rank, num_ranks), Features.all(IN), outputs, bias=True), COLUMNS)
        expected = [x @ whole[name][own[name]].T + COLUMNS[f"{name}.bias"][own[name]] for name in "ab"]
        torch.testing.assert_close(layer(x), torch.cat(expected, dim=1))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_inputs_that_ranks_share_add_up_with_one_bias(num_ranks: int) -> None:
    x = torch.randn(3, IN)
    total = torch.zeros(3, SECOND)
    for rank in range(num_ranks):
        own = half(IN, rank, num_ranks)
        layer = Linear(context_of(rank, num_ranks), Features(IN, own), (Features.all(SECOND, "c"),), bias=True)
        total += fill(layer, ROWS).to_residual(x[:, own.start : own.stop])
    torch.testing.assert_close(total, x @ (ROWS["c.weight"] * ROWS["c.weight_scale"]).T + ROWS["c.bias"])


def test_types_on_file_are_the_methods() -> None:
    layer = Linear(context_of(0, 1), Features.all(IN), (Features.all(SECOND, "c"),), bias=True)
    types = {name: target.file_types for name, target in layer.weights()}
    assert types["c.weight"] == ("I8",)
    assert "F32" in types["c.weight_scale"]
    assert all(target.owner is layer for _, target in layer.weights())


def test_rows_that_round_up_are_zeros() -> None:
    layer = Linear(context_of(0, 1), Features.all(IN), (Features.all(SECOND, "c"),), num_rows=SECOND + 3)
    fill(layer, {name: tensor for name, tensor in ROWS.items() if "bias" not in name})
    assert layer(torch.ones(2, IN)).shape == (2, SECOND + 3)
    assert not layer(torch.ones(2, IN))[:, SECOND:].any()


def test_a_method_without_kernels_of_its_own_computes_step_by_step() -> None:
    """Same numbers as from one that has some."""
    norm = RmsNorm(IN, 1e-5, dtype=torch.float32, device=CPU)
    norm.weight.copy_(torch.rand(IN) + 0.5)
    plain, scaled = (
        Linear(context_of(0, 1, method), Features.all(IN), (Features.all(SECOND, "c"),))
        for method in (UnquantizedLinear, ScaledLinear)
    )
    weight = {"c.weight": ROWS["c.weight"] * ROWS["c.weight_scale"]}
    fill(plain, weight).prepare()
    fill(scaled, {name: tensor for name, tensor in ROWS.items() if "bias" not in name})
    hidden, delta = torch.randn(4, IN), torch.randn(4, IN)
    alone: Any = SimpleNamespace(shard=Shard(), add_and_norm=lambda x, added, norm: norm.after_adding(x, added))
    found = [layer.method.gated(Residual(hidden.clone(), delta, norm, alone)) for layer in (plain, scaled)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
