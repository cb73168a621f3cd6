"""Layers of transformers' modules that are replaced by ours: the same results, and none that is not what it seems."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.errors import ModelError
from outrider.model_executor.layers.quantization import ONLINE, Quantization
from outrider.model_executor.models.config import LLAMA
from outrider.model_executor.models.fallback_attention import HOLDER, AttentionProbe, Current, register
from outrider.model_executor.models.fallback_linear import recording_inputs, replace_linears
from outrider.model_executor.models.fallback_norm import replace_norms

CPU = torch.device("cpu")


def config_with(quantization: Quantization | None) -> Any:
    return SimpleNamespace(variant=LLAMA, quantization=quantization)


class Projections(nn.Module):
    """Queries and keys of one tensor, values of another; a head that stays as it is."""

    def __init__(self, *, order: str = "qkv") -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 4), nn.Linear(6, 2, bias=False), nn.Linear(6, 3)
        self.head, self.order = nn.Linear(6, 5), order

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x + 1
        inputs = {"q": x, "k": x, "v": shifted}
        return torch.cat([getattr(self, name)(inputs[name]) for name in self.order] + [self.head(x)], dim=-1)


def groups_of(model: nn.Module) -> list[list[str]]:
    with recording_inputs(model) as groups, torch.no_grad():
        model(torch.randn(1, 2, 6))
    return groups


NUMBERS = torch.zeros(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_indices": NUMBERS}, "attention with block_indices is not supported"),
        ({"temperature": 2.0}, "attention with temperature is not supported"),
        ({"is_causal": False}, "it has attention masks of its own"),
    ],
    ids=str,
)
def test_attention_with_options_that_ours_lacks_is_refused(options: dict[str, Any], reason: str) -> None:
    module: Any = nn.Module()
    module.layer_idx, module.is_causal = 0, True
    setattr(module, HOLDER, Current(AttentionProbe(None)))
    known = {"scaling": 0.5, "dropout": 0.0, "position_ids": NUMBERS, "use_cache": False}
    attention = ALL_ATTENTION_FUNCTIONS[register()]
    with pytest.raises(ModelError, match=reason):
        attention(module, NUMBERS, NUMBERS, NUMBERS, None, **known, **options)
    attention(module, NUMBERS, NUMBERS, NUMBERS, None, **known, sliding_window=None)


def test_layers_that_read_one_tensor_become_one_product() -> None:
    model, x = Projections(), torch.randn(2, 3, 6)
    with torch.no_grad():
        expected = model(x)
    groups = groups_of(model)
    assert groups == [["q", "k"]]
    replace_linears(model, config_with(None), groups, dtype=torch.float32, device=CPU, scales={})
    assert isinstance(model.v, nn.Linear)
    assert not isinstance(model.q, nn.Linear)
    with torch.inference_mode():
        for _ in range(2):  # the same tensor again is computed again
            torch.testing.assert_close(model(x), expected)
        x += 1
        with pytest.raises(AssertionError):
            torch.testing.assert_close(model(x), expected)


def test_outputs_are_those_of_the_tensor_that_is_given_last() -> None:
    """Parts of a product may be asked for in any order."""
    model, first, second = Projections(), torch.randn(3, 6), torch.randn(3, 6)
    with torch.no_grad():
        expected = model.q(first), model.k(second), model.q(second), model.q(second), model.k(first)
    replace_linears(model, config_with(None), [["q", "k"]], dtype=torch.float32, device=CPU, scales={})
    with torch.inference_mode():
        found = model.q(first), model.k(second), model.q(second), model.q(second), model.k(first)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted)


def test_a_group_that_a_format_covers_in_part_is_quantized_layer_by_layer() -> None:
    model = Projections()
    config = config_with(replace(ONLINE, ignored=("k$", "head$")))
    replace_linears(model, config, [["q", "k"], ["q", "v"]], dtype=torch.float32, device=CPU, scales={})
    assert [name for name, module in model.named_modules() if type(module) is nn.Linear] == ["k", "head"]


class Named(Projections):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q(input=x), self.k(input=x), self.v(x), self.head(input=x)], dim=-1)


def test_layers_that_are_given_their_input_by_name_stay() -> None:
    assert groups_of(Named()) == []


def test_a_layer_that_is_called_twice_is_in_no_group() -> None:
    assert groups_of(Projections(order="qkq")) == []


class OwnRMSNorm(nn.Module):
    def __init__(self, offset: float = 0.0, power: float = 0.5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(8)), 1e-3
        self.offset, self.power = offset, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.eps) ** -self.power
        return x * scale * (self.weight + self.offset)


@pytest.mark.parametrize("change", [{}, {"offset": 1.0}], ids=str)
def test_norms_with_the_same_results_are_replaced(change: dict[str, Any]) -> None:
    model, x = nn.Sequential(OwnRMSNorm(**change)), torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = model(x)
        replace_norms(model, torch.float32)
        assert not isinstance(model[0], OwnRMSNorm)
        torch.testing.assert_close(model(x.transpose(0, 1)).transpose(0, 1), expected)


class GatedRMSNorm(OwnRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normed = super().forward(x)
        return normed if gate is None else normed * gate.sigmoid()


class RootEpsRMSNorm(OwnRMSNorm):
    """Adds eps to the root, not to the mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class HiddenEpsRMSNorm(OwnRMSNorm):
    """Has another eps than its attribute says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize(
    "norm",
    [OwnRMSNorm(offset=0.5), OwnRMSNorm(power=0.6), GatedRMSNorm(), RootEpsRMSNorm(), HiddenEpsRMSNorm()],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_with_others_stay(norm: OwnRMSNorm) -> None:
    norm.eps = 1e-5  # as of published models: of no effect on numbers near 1
    model = nn.Sequential(norm)
    replace_norms(model, torch.float32)
    assert model[0] is norm
