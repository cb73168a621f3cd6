"""Hidden states of a model of transformers, taken by hooks on its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from outrider.errors import ModelError
from outrider.types import LAST_HIDDEN_STATE


@dataclass(slots=True)
class CollectedStates:
    """States of one forward."""

    layers: Sequence[int]
    found: dict[int, torch.Tensor] = field(default_factory=dict)
    """States by the number of layers that come before: [T, hidden]."""

    def joined(self, last: torch.Tensor) -> torch.Tensor:
        """States of the layers side by side, [T, F]; ``last`` [T, hidden] is what the head reads."""
        states = [last if layer == LAST_HIDDEN_STATE else self.found[layer] for layer in self.layers]
        return torch.cat([last[:, :0], *states], dim=-1)


class LayerStates:
    """Hooks on the decoder layers of a model: state i is what layer i reads, and of the last one what it gives."""

    def __init__(self, model: nn.Module, num_layers: int) -> None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._layers = next((one for one in lists if len(one) == num_layers and _has_attention(one[0])), None)

    @contextlib.contextmanager
    def collected(self, layers: Sequence[int]) -> Iterator[CollectedStates]:
        """Collect the states of ``layers`` in the forward within."""
        states, hooks = CollectedStates(layers), []
        wanted = {layer for layer in layers if layer != LAST_HIDDEN_STATE}
        try:
            for layer in wanted:
                hooks.append(self._hook(states, layer))
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, states: CollectedStates, layer: int) -> torch.utils.hooks.RemovableHandle:
        if self._layers is None:
            raise ModelError("through transformers this model has no list of layers whose states could be read")
        if layer < len(self._layers):

            def before(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
                states.found[layer] = (inputs[0] if inputs else options["hidden_states"])[0].clone()

            return self._layers[layer].register_forward_pre_hook(before, with_kwargs=True)

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
            states.found[layer] = (output[0] if isinstance(output, tuple) else output)[0].clone()

        return self._layers[-1].register_forward_hook(after)


def _has_attention(layer: nn.Module) -> bool:
    return any(isinstance(getattr(module, "layer_idx", None), int) for module in layer.modules())
