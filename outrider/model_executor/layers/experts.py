"""Experts (mixture of experts, MoE): a router chooses a few of many gated feed-forward layers for each token.

The weights of all experts of a layer lie one after the other in one linear layer, so that every weight format and every
division among ranks is that of linear layers. Of several ranks each holds a share of every expert's inner features, or
some experts whole (expert parallelism); what the last product gives is then a part of a sum. Each rank has the whole
router, in the model's own type unless the files have it in the weights' format.

Shape letters: ``T`` tokens, ``A`` experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outrider.errors import ModelError
from outrider.kernels.experts import Routing, SigmoidScores, part_of, route, sum_experts
from outrider.kernels.launching import has_kernels
from outrider.kernels.swiglu import clamped_swiglu, geglu, swiglu
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import FeedForward, Residual, Weights, whole
from outrider.model_executor.layers.feed_forward import GatedMlp
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.layers.linear_methods import UnquantizedLinear
from outrider.model_executor.layers.quantization import MXFP4_GROUP, Numbers

if TYPE_CHECKING:
    from outrider.model_executor.distributed.sharding import Shard
    from outrider.model_executor.models.config import ExpertsConfig, ModelConfig


class SparseMlp:
    """One layer's router and experts; a ``FeedForward``."""

    def __init__(self, context: LayerContext, layer: int) -> None:
        config = context.config
        if (experts := config.experts) is None:
            raise ModelError(f"{config.architecture} without experts in its configuration")
        names = experts.names
        self._num_chosen, self._normalizes = experts.num_chosen, experts.normalizes
        self._prefix = names.prefix
        is_summed_here = not context.is_alone or config.variant.norms.has_after
        self._leaves_sum = not is_summed_here and has_kernels(context.device)
        module, count, shard = f"model.layers.{layer}.{names.prefix}", experts.count, context.communicator.shard
        hidden = Features.all(config.hidden_size)
        self._held = shard.experts(experts)
        inner = _inner_features(config, experts, shard)
        bias, self._clamp = experts.has_bias, experts.clamp
        self._gated = _gate_of(config)
        self.router = Linear(
            context, hidden, (Features.all(count, names.router),), bias=bias, module=module,
            make_method=None if names.router in experts.quantized_gates else UnquantizedLinear,
        )  # fmt: skip
        outputs = tuple(Features.all(hidden.size, f"experts.{expert}.{names.down}") for expert in self._held)
        gates_and_ups, num_held = _gates_and_ups(experts, inner, self._held), len(self._held)
        self.gate_up = Linear(context, hidden, gates_and_ups, bias=bias, module=module, num_experts=num_held)
        self.down = Linear(context, inner, outputs, bias=bias, module=module, num_experts=num_held)
        self.shared = SharedExpert(context, module, experts) if experts.shared_size else None
        self._score_bias, self._scores = f"{names.router}.{names.score_bias}", None
        if (form := experts.sigmoid) is not None:
            offsets = torch.empty(count, dtype=torch.float32, device=context.device)
            self._scores = SigmoidScores(offsets, form.scale, form.num_groups, form.num_groups_chosen)
        self._factors_name, self._factors = names.factors, None
        if names.factors is not None:
            self._factors = torch.empty(count, dtype=torch.float32, device=context.device)

    def __call__(self, source: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with what was to be added, and what this block adds to it."""
        hidden, x = source.normed()
        return hidden, self.of(x, x)

    def of(self, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Sum [T, hidden], or products to be added up, of the experts that ``routed`` [T, hidden] chooses for ``x``."""
        routing = self._route(routed)
        gate_up, clamp = self.gate_up.method.grouped(x, routing), self._clamp
        inner = (
            self._gated(gate_up) if clamp is None else clamped_swiglu(gate_up, clamp.alpha, clamp.limit)
        )  # [A * T, inner]
        products = self.down.method.grouped(inner, routing, is_weighted=True)  # [A, T, hidden]
        if self.shared is not None:
            return sum_experts(products, x.dtype).add_(self.shared(x))
        return products if self._leaves_sum else sum_experts(products, x.dtype)

    def _route(self, x: torch.Tensor) -> Routing:
        """Experts of each token that this rank holds."""
        logits = self.router(x)
        routing = route(logits, self._num_chosen, normalizes=self._normalizes, scores=self._scores)
        if self._factors is not None:
            factors = self._factors.index_select(0, routing.expert_ids.flatten()).view_as(routing.weights)
            routing = replace(routing, weights=routing.weights * factors)
        return routing if len(self._held) == logits.shape[1] else part_of(routing, self._held)

    def weights(self) -> Weights:
        """The tensors of router and experts."""
        yield from self.router.weights(self._prefix)
        if self._scores is not None:
            yield self._prefix + self._score_bias, whole(self._scores.bias)
        if self._factors is not None:
            yield f"{self._prefix}{self._factors_name}", whole(self._factors)
        yield from self.gate_up.weights(self._prefix)
        yield from self.down.weights(self._prefix)
        if self.shared is not None:
            yield from self.shared.weights(self._prefix)


class SharedExpert:
    """Expert that every token meets, weighted by the sigmoid of a gate if it has one."""

    def __init__(self, context: LayerContext, module: str, experts: ExpertsConfig) -> None:
        """``module``: prefix of its tensors' names in the whole model."""
        size, name = experts.shared_size, experts.names.shared
        self._gated = _gate_of(context.config)
        own, hidden = context.communicator.shard.inner(size), Features.all(context.config.hidden_size)
        gate, up = (Features(size, own, f"{name}.{part}") for part in ("gate_proj", "up_proj"))
        self.gate_up = Linear(context, hidden, (gate, up), module=module)
        output = Features.all(hidden.size, f"{name}.down_proj")
        self.down = Linear(context, Features(size, own), (output,), module=module)
        weight = (Features.all(1, f"{name}_gate"),)
        self.weight = None
        if experts.has_shared_gate:
            make_method = None if f"{name}_gate" in experts.quantized_gates else UnquantizedLinear
            self.weight = Linear(context, hidden, weight, module=module, make_method=make_method)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, hidden] to the same shape."""
        found = self.down(self._gated(self.gate_up(x)))
        return found if self.weight is None else found * self.weight(x).sigmoid()

    def weights(self, prefix: str) -> Weights:
        """Tensors of the expert."""
        for linear in (self.gate_up, self.down, self.weight):
            if linear is not None:
                yield from linear.weights(prefix)


def _gate_of(config: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Kernel that multiplies ups with the activation of gates."""
    return geglu if config.variant.activation == "gelu_tanh" else swiglu


def _inner_features(config: ModelConfig, experts: ExpertsConfig, shard: Shard) -> Features:
    """Inner features of each expert that this rank holds."""
    size = experts.intermediate_size
    if experts.is_parallel:
        return Features.all(size)
    is_mxfp4 = config.quantization is not None and config.quantization.numbers is Numbers.MXFP4
    return Features(size, shard.inner(size, multiple=MXFP4_GROUP if is_mxfp4 else 1))


def _gates_and_ups(experts: ExpertsConfig, inner: Features, numbers: range) -> tuple[Features, ...]:
    """Outputs of the first product of some experts: of each its gates, then its ups."""
    names, own = experts.names, inner.own
    if names.gate_up is None:
        sides = [(expert, name) for expert in numbers for name in (names.gate, names.up)]
        return tuple(Features(inner.size, own, f"experts.{expert}.{name}") for expert, name in sides)
    order = (*range(0, 2 * len(own), 2), *range(1, 2 * len(own), 2))
    both = range(2 * own.start, 2 * own.stop)
    return tuple(Features(2 * inner.size, both, f"experts.{expert}.{names.gate_up}", order) for expert in numbers)


def sparse_mlp(context: LayerContext, layer: int) -> FeedForward:
    """The second block of a layer: experts, or an MLP in the layers that have none."""
    experts = context.config.experts
    has_experts = experts is not None and experts.layers[layer]
    return SparseMlp(context, layer) if has_experts else GatedMlp(context, layer)
