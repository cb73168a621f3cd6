"""Gated feed-forward layer: down(act(gate(x)) * up(x)), act silu or gelu. Gate and up come from one product.

Of several ranks each holds a share of the inner features; what the last product gives is then a part of a sum.
"""

from __future__ import annotations

import torch

from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Residual, Weights
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features


class GatedMlp:
    """One layer's MLP; a ``FeedForward``."""

    def __init__(self, context: LayerContext, layer: int) -> None:
        config = context.config
        own = context.communicator.shard.inner(config.intermediate_size)
        gate, up, inner = (Features(config.intermediate_size, own, name) for name in ("gate_proj", "up_proj", ""))
        hidden, output = Features.all(config.hidden_size), Features.all(config.hidden_size, "down_proj")
        module = f"model.layers.{layer}.mlp."
        self.gate_up = Linear(context, hidden, (gate, up), bias=config.mlp_bias, module=module)
        self._is_gelu = config.variant.activation == "gelu_tanh"
        self.down = Linear(context, inner, (output,), bias=config.mlp_bias, module=module)

    def __call__(self, source: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with what was to be added, and what this block adds to it."""
        method = self.gate_up.method
        if self.down.method.takes_gates:
            hidden, gate_up = method.of_normed(source)
            return hidden, self.down.gates_to_residual(gate_up, is_gelu=self._is_gelu)
        hidden, inner = method.gated_by_gelu(source) if self._is_gelu else method.gated(source)
        return hidden, self.down.to_residual(inner)

    def weights(self) -> Weights:
        """The projections' tensors."""
        yield from self.gate_up.weights("mlp.")
        yield from self.down.weights("mlp.")
