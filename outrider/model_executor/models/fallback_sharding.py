"""Linear layers of a model of transformers, each rank with its part, as transformers' tensor-parallel plan says.

A ``colwise`` layer is cut by its output, and a ``rowwise`` one by its input, whose sum the ranks make. Norms with a
weight for each head, as of Command R+, are cut by heads. What the plan does not name, and what it gathers again, every
rank computes whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from outrider.errors import ConfigError
from outrider.model_executor.distributed.communicator import Communicator
from outrider.model_executor.distributed.sharding import SETTING, Shard

_WHOLE = ("colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce")


class _RowwiseLinear(nn.Module):
    """Linear layer of a part of the input: [..., K / ranks] to [..., N], summed over ranks."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, communicator: Communicator) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` by the weight, and the bias once."""
        part = nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        total = self._communicator.all_reduce(part).view(*x.shape[:-1], -1)
        return total if self.bias is None else total + self.bias


def share_linears(
    model: Any,  # noqa: ANN401 - transformers' own class
    communicator: Communicator,
    num_kv_heads: int,
    kept: Collection[nn.Linear],
) -> dict[nn.Linear, str]:
    """Leave this rank's part of the linear layers of a decoder; ``ConfigError`` where its plan is none of ours. Those
    that are ``kept`` whole come back with what the plan says of them.
    """
    shard, decoder = communicator.shard, model.get_decoder()
    text = model.config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None)
    if any(getattr(text, "activation_sparsity_pattern", None) or ()):  # of Gemma 3n; its plan passes over that
        why = "activation_sparsity_pattern compares all features of a token, of which each rank has a part"
        raise ConfigError(SETTING, f"must be 1 for {type(model).__name__}: its {why}")
    if not plan:
        raise ConfigError(SETTING, f"must be 1 for {type(model).__name__}: transformers has no plan of how to share it")
    if num_kv_heads % shard.size:
        heads = f"{num_kv_heads} key and value heads, as is needed through transformers"
        raise ConfigError(SETTING, f"{shard.size} does not fit this model: it does not divide its {heads}")
    kinds = dict[nn.Linear, str]()
    for name, module in list(decoder.named_modules()):
        kind = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if kind in ("colwise", "rowwise") and module in kept:
            kinds[module] = kind
        elif kind in ("colwise", "rowwise") and type(module) is nn.Linear:
            parent, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(parent), attribute, _part_of(name, module, kind, communicator, shard))
        elif _has_heads(name, module):
            _keep_rows(module, name, shard)
        elif kind is not None and kind not in _WHOLE:
            why = f"its {name} would be shared as {kind}, and only linear layers can be"
            raise ConfigError(SETTING, f"must be 1 for {type(model).__name__} through transformers: {why}")
    return kinds


def _has_heads(name: str, module: nn.Module) -> bool:
    """True for a norm whose weight is [heads, head_dim]."""
    weight = getattr(module, "weight", None)
    return name.endswith("norm") and isinstance(weight, torch.Tensor) and weight.ndim > 1


def _part_of(name: str, linear: nn.Linear, kind: str, communicator: Communicator, shard: Shard) -> nn.Module:
    if kind == "rowwise":
        own = own_part(name, linear.in_features, shard)
        return _RowwiseLinear(linear.weight[:, own].detach().clone(), linear.bias, communicator)
    _keep_rows(linear, name, shard)
    linear.out_features = len(linear.weight)
    return linear


def _keep_rows(module: nn.Module, name: str, shard: Shard) -> None:
    """Leave this rank's rows of a module's parameters."""
    for kind, parameter in list(module.named_parameters(recurse=False)):
        own = own_part(name, len(parameter), shard)
        setattr(module, kind, nn.Parameter(parameter[own].detach().clone(), requires_grad=False))


def own_part(name: str, size: int, shard: Shard) -> slice:
    """Slice of ``size`` rows or columns that are this rank's."""
    if size % shard.size:
        raise ConfigError(SETTING, f"{shard.size} does not fit this model: it does not divide the {size} of {name}")
    return slice(shard.rank * size // shard.size, (shard.rank + 1) * size // shard.size)
