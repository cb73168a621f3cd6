"""Per-layer embeddings: features of each token that every layer gets beside the residual stream (Gemma 3n and 4).

Every rank holds them whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.kernels.embedding import look_up
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Weights, whole
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.layers.norm import RmsNorm


class LayerInputs:
    """Features of all layers: rows of a second embedding, and a product with the first."""

    def __init__(self, context: LayerContext) -> None:
        config, size = context.config, context.config.variant.layer_input_size
        self._num_layers, self._size = config.num_layers, size
        self._table = torch.empty(
            config.vocab_size, config.num_layers * size, dtype=context.dtype, device=context.device
        )
        output = Features.all(config.num_layers * size, "per_layer_model_projection")
        self._projection = Linear(context, Features.all(config.hidden_size), (output,), module="model.")
        self._norm = RmsNorm(size, config.rms_norm_eps, dtype=context.dtype, device=context.device)
        self._multiplier = float(torch.tensor(size**0.5, dtype=context.dtype))
        self._projection_multiplier = config.hidden_size**-0.5

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """``token_ids`` [T] and their embedding [T, hidden] to [L, T, P]."""
        own = look_up(token_ids, self._table).mul_(self._multiplier)
        projected = self._projection(embedded).mul_(self._projection_multiplier).view(-1, self._size)
        found = self._norm(projected).add_(own.view(-1, self._size)).mul_(2.0**-0.5)
        return found.view(len(embedded), self._num_layers, self._size).transpose(0, 1)

    def weights(self) -> Weights:
        """Tensors, named below the model."""
        yield "embed_tokens_per_layer.weight", whole(self._table)
        yield from self._projection.weights()
        yield "per_layer_projection_norm.weight", self._norm.target()


class LayerInputBlock:
    """Third block of a layer: its features of each token, gated by the residual stream."""

    def __init__(self, context: LayerContext, layer: int) -> None:
        config, module = context.config, f"model.layers.{layer}."
        inner, hidden = config.variant.layer_input_size, config.hidden_size
        self._is_gelu = config.variant.activation == "gelu_tanh"
        self._gate = Linear(
            context, Features.all(hidden), (Features.all(inner, "per_layer_input_gate"),), module=module
        )
        self._projection = Linear(
            context, Features.all(inner), (Features.all(hidden, "per_layer_projection"),), module=module
        )
        self._norm = RmsNorm(hidden, config.rms_norm_eps, dtype=context.dtype, device=context.device)

    def __call__(self, hidden: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Addend [T, hidden] to the residual stream ``hidden`` [T, hidden]; ``features`` are the layer's, [T, P]."""
        gate = self._gate(hidden)
        gate = F.gelu(gate, approximate="tanh") if self._is_gelu else F.silu(gate)
        return self._norm(self._projection(gate.mul_(features)))

    def weights(self) -> Weights:
        """Tensors, named below the layer."""
        yield from self._gate.weights()
        yield from self._projection.weights()
        yield "post_per_layer_input_norm.weight", self._norm.target()
