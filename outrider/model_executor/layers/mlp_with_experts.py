"""MLP and experts that read one residual stream, as Gemma 4 adds them up: each reads a norm of its own and is
normalised before they are added, and so is their sum. The router reads the stream under a third norm.
"""

from __future__ import annotations

import torch

from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import FeedForward, Residual, Weights, WeightTarget
from outrider.model_executor.layers.experts import SparseMlp
from outrider.model_executor.layers.feed_forward import GatedMlp
from outrider.model_executor.layers.norm import RmsNorm


class MlpWithExperts:
    """One layer's MLP and experts; a ``FeedForward`` whose output is normalised, the sum of all ranks."""

    def __init__(self, context: LayerContext, layer: int) -> None:
        config = context.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.mlp, self.experts = GatedMlp(context, layer), SparseMlp(context, layer)
        self._communicator = context.communicator
        norms = [RmsNorm(size, eps, dtype=context.dtype, device=context.device) for _ in range(5)]
        self._router_norm, self._experts_norm, self._mlp_output_norm, self._experts_output_norm, self._norm = norms

    def __call__(self, source: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with what was to be added, and what this block adds to it."""
        hidden, found = self.mlp(source)
        of_experts = self.experts.of(self._experts_norm(hidden), self._router_norm(hidden))
        found = self._mlp_output_norm(self._communicator.all_reduce(found))
        found = found.add_(self._experts_output_norm(self._communicator.all_reduce(of_experts)))
        return hidden, self._norm(found)

    def weights(self) -> Weights:
        """Tensors of both."""
        yield from self.mlp.weights()
        yield from self.experts.weights()
        scale = self._router_norm.weight
        yield (
            "router.scale",
            WeightTarget(scale, tuple(scale.shape), writer=lambda content: scale.copy_(content * len(scale) ** -0.5)),
        )
        yield "pre_feedforward_layernorm_2.weight", self._experts_norm.target()
        yield "post_feedforward_layernorm_1.weight", self._mlp_output_norm.target()
        yield "post_feedforward_layernorm_2.weight", self._experts_output_norm.target()
        yield "post_feedforward_layernorm.weight", self._norm.target()


def gemma4_mlp(context: LayerContext, layer: int) -> FeedForward:
    """The second block of a layer: an MLP, with experts in models that have them."""
    return GatedMlp(context, layer) if context.config.experts is None else MlpWithExperts(context, layer)
