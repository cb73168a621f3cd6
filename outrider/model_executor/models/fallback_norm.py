"""RMS norms of a model of transformers, replaced by ours, one kernel where theirs are six.

A module is replaced if its class is called an RMS norm and its results, in float32, are those of ours.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator

import torch
from torch import nn

from outrider.errors import ModelError
from outrider.kernels.rms_norm import prepare_norm

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_OFFSETS = (0.0, 1.0)
"""Added to weights: Gemma's are kept less 1."""
_TOLERANCE = 1e-4
_LARGE = 1e3
"""Scale of the probe at which an epsilon does not count."""


class _Norm(nn.Module):
    """RMS norm of the last axis."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        whole = weight.detach() if not offset else weight.detach().float() + offset
        self._prepared = prepare_norm(whole, eps, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., N] normalised."""
        return self._prepared(x.reshape(-1, x.shape[-1])).view(x.shape)


def replace_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Put ours in the place of RMS norms of weights of ``dtype``."""
    for name, module, eps in list(_candidates(model, dtype)):
        offset = _offset(module, eps)
        if offset is not None:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, _Norm(_weight(module), eps, offset, dtype))


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module.weight
    if not isinstance(weight, nn.Parameter):
        raise ModelError(f"{type(module).__name__} without a weight")
    return weight


def _candidates(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module, float]]:
    for name, module in model.named_modules():
        eps = next((getattr(module, one) for one in _EPS_NAMES if hasattr(module, one)), None)
        shapes = {kind: (one.ndim, one.dtype) for kind, one in module.named_parameters()}
        is_norm = "rmsnorm" in type(module).__name__.lower() and shapes == {"weight": (1, dtype)}
        if is_norm and isinstance(eps, float) and len(inspect.signature(module.forward).parameters) == 1:
            yield name, module, eps  # a gated norm takes the gate too


def _offset(module: nn.Module, eps: float) -> float | None:
    """The offset with which ours gives what the module gives for random inputs; None: with none."""
    theirs, weight = copy.deepcopy(module).float(), _weight(module).detach().float()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([math.sqrt(eps), 1.0, _LARGE])  # the first is one where eps counts
    x = (sizes[:, None] * torch.randn(len(sizes), len(weight), generator=generator)).to(weight.device)
    expected = theirs(x)
    for offset in _OFFSETS:
        if torch.allclose(prepare_norm(weight + offset, eps)(x), expected, atol=_TOLERANCE, rtol=_TOLERANCE):
            return offset
    return None
