"""Linear layers of a model of transformers, replaced by ours where their weights are quantized while loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers.utils.logging import tqdm

from outrider.errors import ModelError
from outrider.model_executor.layers.linear_method import Features, LinearMethod, LinearSpec
from outrider.model_executor.layers.linear_methods import linear_method_of
from outrider.model_executor.layers.quantization import Quantization


class _MethodLinear(nn.Module):
    """Linear layer whose product a ``LinearMethod`` computes: [..., K] to [..., N]."""

    def __init__(self, method: LinearMethod) -> None:
        super().__init__()
        self._method = method

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., K] by the weight."""
        return self._method(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def covered_linears(model: nn.Module, quantization: Quantization) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers, by name, that a format covers; ``ModelError`` where there are none. The head is not among them:
    its modules may differ in what they do with it.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and quantization.covers([name])
    ]
    if not found:
        raise ModelError("none of its layers is a linear one that can be FP8")
    yield from found


def replace_linears(model: nn.Module, quantization: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    """Put ours in the place of the layers that a format covers, one after the other: each is released when its copy
    is made.
    """
    make, linears = linear_method_of(quantization), list(covered_linears(model, quantization))
    for name, linear in tqdm(linears, desc="Quantizing"):  # which reports progress
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _MethodLinear(_filled(make, name, linear, dtype, device)))


def _filled(
    make: Callable[[LinearSpec], LinearMethod], name: str, linear: nn.Linear, dtype: torch.dtype, device: torch.device
) -> LinearMethod:
    """A method with the weight and bias of a linear layer."""
    size = linear.out_features
    spec = LinearSpec(
        Features.all(linear.in_features), (Features.all(size, name),), size, linear.bias is not None, dtype, device
    )
    method = make(spec)
    for kind, parameter in method.parameters().items():
        content = getattr(linear, kind).detach()
        if parameter.write is None:
            parameter.tensor.copy_(content)
        else:
            parameter.write(slice(0, size), content)
    method.prepare()
    return method
