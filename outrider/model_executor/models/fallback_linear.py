"""Linear layers of a model of transformers, replaced by ours: one product for layers that read the same tensor, FP8
where weights are quantized, on file or while loading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.utils.logging import tqdm

from outrider.errors import ModelError
from outrider.model_executor.distributed.communicator import SINGLE_RANK, Communicator
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Weights
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features, LinearMethod
from outrider.model_executor.layers.linear_methods import linear_method_of
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.fallback_sharding import own_part

Groups = Sequence[Sequence[str]]
"""Names of linear layers that read the same tensor."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Linear layers that become ours and that ranks share: ``colwise`` by their outputs, or ``rowwise`` by inputs."""

    ranks: Communicator = SINGLE_RANK
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Way in which the plan shares each, by name."""

    def inputs(self, name: str, linear: nn.Linear) -> Features:
        """Features that go into a layer here."""
        return self._part(name, linear.in_features, is_shared=self.kinds.get(name) == "rowwise")

    def outputs(self, name: str, linear: nn.Linear) -> Features:
        """Features that come out of a layer here, by its ``name``."""
        return self._part(name, linear.out_features, is_shared=self.kinds.get(name) == "colwise")

    def _part(self, name: str, size: int, *, is_shared: bool) -> Features:
        own = own_part(name, size, self.ranks.shard) if is_shared else slice(0, size)
        return Features(size, range(own.start, own.stop), name)


ALONE = Shares()


class _Product:
    """Product of linear layers that read one tensor, computed where the first of them is called."""

    def __init__(self, method: LinearMethod, sizes: Sequence[int], summed_by: Communicator = SINGLE_RANK) -> None:
        """``summed_by``: the ranks of whose parts of the input it is the sum."""
        self._method, self._sizes, self._ranks = method, list(sizes), summed_by
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        """Outputs of ``_input`` that are still to be taken, each once."""

    def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Output of one layer: [..., K] to [..., N]."""
        if x is not self._input or number not in self._parts:
            output = self._ranks.all_reduce(self._method(x.reshape(-1, x.shape[-1]))).view(*x.shape[:-1], -1)
            self._input, self._parts = x, dict(enumerate(torch.split(output, self._sizes, -1)))
        found = self._parts.pop(number)
        if not self._parts:
            self._input = None
        return found


class _PartLinear(nn.Module):
    """One linear layer of a product: [..., K] to [..., N]."""

    def __init__(self, product: _Product, number: int) -> None:
        super().__init__()
        self._product, self._number = product, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., K] by the weight."""
        return self._product.part(self._number, x)


@contextlib.contextmanager
def recording_inputs(model: nn.Module) -> Iterator[list[list[str]]]:
    """Groups of neighbouring linear layers that read the same tensor in the one forward within."""
    found: list[list[str]] = []
    readers: dict[tuple[str, int], list[str]] = {}
    inputs: list[torch.Tensor] = []  # kept, so that no two have one id

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def before(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            if arguments:  # else it is named, and ours has another name
                inputs.append(arguments[0])
                readers.setdefault((name.rpartition(".")[0], id(arguments[0])), []).append(name)

        return before

    hooks = [module.register_forward_pre_hook(hook(name)) for name, module in _linears(model)]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()
        found += [names for names in readers.values() if len(names) == len(set(names)) > 1]


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers by name, but for the head: its modules may differ in what they do with it."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not head:
            yield name, module


def covered_linears(model: nn.Module, config: ModelConfig) -> dict[str, nn.Linear]:
    """Linear layers, by name, that are quantized; ``ModelError`` where there are none, and should be, or where experts
    are too, which one module of transformers holds together.
    """
    if (quantization := config.quantization) is None:
        return {}
    found = {name: module for name, module in _linears(model) if quantization.covers([name])}
    if not found:
        raise ModelError("none of its layers is a linear one that can be FP8")
    for name, _ in model.named_modules():
        if name.endswith(".experts") and not quantization.is_online and quantization.covers([f"{name}.0.down_proj"]):
            raise ModelError(
                f"config.json says that {name} are FP8, which through transformers only linear layers can be"
            )
    return found


def stored_tensors(model: nn.Module, config: ModelConfig, shares: Shares) -> Weights:
    """Tensors that the files have for the quantized linear layers; none of layers quantized while loading.
    ``ConfigError`` where ranks cannot share a layer.
    """
    for name, module in covered_linears(model, config).items():
        tensors = list(_layer({name: module}, config, config.dtype, torch.device("meta"), shares).weights())
        if config.quantization is not None and not config.quantization.is_online:
            yield from tensors


def replace_linears(
    model: nn.Module,
    config: ModelConfig,
    groups: Groups,
    *,
    dtype: torch.dtype,
    device: torch.device,
    scales: Mapping[str, torch.Tensor],
    shares: Shares = ALONE,
) -> None:
    """Put ours in the place of linear layers, one product after the other: layers are released when their copy is
    made. Without quantization of the ``groups`` only; ``scales`` are those on file.
    """
    groups = [names for names in groups if len(set(map(shares.kinds.get, names))) == 1]
    is_quantized = config.quantization is not None
    linears = covered_linears(model, config) if is_quantized else dict(_linears(model))
    wanted = _products(linears, groups, has_singles=is_quantized)
    for names in tqdm(wanted, desc="Quantizing") if is_quantized else wanted:  # which reports progress
        members = {name: linears.pop(name) for name in names}
        product = _Product(
            _filled(_layer(members, config, dtype, device, shares), members, scales),
            [len(shares.outputs(name, one).own) for name, one in members.items()],
            shares.ranks if shares.kinds.get(names[0]) == "rowwise" else SINGLE_RANK,
        )
        for number, name in enumerate(names):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, _PartLinear(product, number))
        members.clear()


def _products(linears: Collection[str], groups: Groups, *, has_singles: bool) -> list[list[str]]:
    """Names of the layers of each product: of groups of which all are there, and of each other layer if asked for."""
    found, left = list[list[str]](), dict.fromkeys(linears)
    for names in groups:
        if left.keys() >= set(names):
            found.append(list(names))
            for name in names:
                del left[name]
    return [*found, *([name] for name in left)] if has_singles else found


def _layer(
    linears: Mapping[str, nn.Linear], config: ModelConfig, dtype: torch.dtype, device: torch.device, shares: Shares
) -> Linear:
    """Linear layers as one of ours, to be filled."""
    context = LayerContext(config, config, dtype, device, shares.ranks, linear_method_of(config.quantization))
    outputs = [shares.outputs(name, one) for name, one in linears.items()]
    has_bias = any(one.bias is not None for one in linears.values())
    return Linear(context, shares.inputs(*next(iter(linears.items()))), outputs, bias=has_bias)


def _filled(layer: Linear, linears: Mapping[str, nn.Linear], scales: Mapping[str, torch.Tensor]) -> LinearMethod:
    """The layer's method with the weights and biases of linear layers; FP8 numbers have lost nothing in their type."""
    for name, target in layer.weights():
        module, _, kind = name.rpartition(".")
        content = scales[name] if name in scales else getattr(linears[module], kind)
        content = torch.zeros(target.shape) if content is None else content.detach()
        target.write(content if target.part is None else content[target.part])
    layer.prepare()
    return layer.method
