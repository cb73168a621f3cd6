"""Gated DeltaNet layer, in place of attention: projections, causal convolution and gated delta rule over recurrent
states, gated norm, output product.

Of several ranks each holds its key heads and the heads of values that belong to them; what the output product gives is
then a part of a sum.
"""

from __future__ import annotations

import torch

from outrider.errors import ModelError
from outrider.kernels.gated_delta import DeltaRows, DeltaShape, DeltaSlots, DeltaWeights, gated_delta, gated_norm
from outrider.kernels.rope_and_cache import CosSin
from outrider.kv_cache import RecurrentSpec
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Residual, StateInputs, Weights, WeightTarget
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features


class GatedDeltaNet:
    """One recurrent layer; a ``TokenMixer``."""

    weight_prefix = "linear_attn."

    def __init__(self, context: LayerContext, layer: int) -> None:
        config, device = context.config, context.device
        if (recurrent := config.recurrent) is None:
            raise ModelError(f"{config.architecture} without recurrent layers in its configuration")
        self._own = own = context.communicator.shard.key_heads(recurrent)
        self._group = recurrent.num_heads // recurrent.num_key_heads
        self._all = DeltaShape(
            recurrent.num_heads, recurrent.num_key_heads, recurrent.key_dim, recurrent.value_dim, recurrent.num_taps
        )
        self._shape = shape = DeltaShape(
            len(own) * self._group, len(own), recurrent.key_dim, recurrent.value_dim, recurrent.num_taps
        )
        self._batch_invariant = context.batch_invariant
        self._is_interleaved, self._eps = recurrent.is_interleaved, config.rms_norm_eps
        self.kv_cache_spec = RecurrentSpec(
            shape.num_heads, shape.key_dim, shape.value_dim, shape.num_inputs, shape.num_taps
        )
        hidden, module = Features.all(config.hidden_size), f"model.layers.{layer}.{self.weight_prefix}"
        mixed, gates = self._inputs()
        self.mixed = Linear(context, hidden, mixed, module=module)
        self.gates = Linear(context, hidden, gates, module=module)
        values = self._features("", recurrent.value_dim * self._group)
        self.output = Linear(context, values, (Features.all(config.hidden_size, "out_proj"),), module=module)
        self._taps = torch.empty(shape.num_channels, shape.num_taps, dtype=torch.float32, device=device)
        self._decay, self._bias = (torch.empty(shape.num_heads, dtype=torch.float32, device=device) for _ in range(2))
        self._weights = DeltaWeights(self._taps, self._decay, self._bias)
        self._norm = torch.empty(shape.value_dim, dtype=context.dtype, device=device)

    def __call__(
        self,
        source: Residual,
        cache: DeltaSlots,
        cos_sin: CosSin,
        inputs: StateInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Go on from the rows' states in ``cache``. Returns the residual stream with what was to be added, and what
        this block adds to it.
        """
        hidden, x = source.normed()
        own, gate = self._split(self.mixed(x), self.gates(x))
        rows = DeltaRows(
            inputs.query_starts, inputs.context_lengths, inputs.token_slots, inputs.slots, inputs.starts, inputs.ends,
            in_chunks=not self._batch_invariant and inputs.max_queries > self.kv_cache_spec.log_length,
        )  # fmt: skip
        outputs = gated_delta(own, cache, rows, self._weights, self._shape)
        normed = gated_norm(outputs, gate, self._norm, self._eps, rows)
        return hidden, self.output.to_residual(normed.view(len(x), -1))

    def weights(self) -> Weights:
        """Tensors of the projections, the convolution, the gates and the norm."""
        for linear in (self.mixed, self.gates, self.output):
            yield from linear.weights()
        full, channels = self._all, self._channels()
        heads = slice(self._own.start * self._group, self._own.stop * self._group)
        yield "conv1d.weight", WeightTarget(
            self._taps, (full.num_channels, 1, full.num_taps),
            writer=lambda content: self._taps.copy_(content[channels.to(content.device), 0]),
        )  # fmt: skip
        decay = WeightTarget(
            self._decay, (full.num_heads,), (heads,), writer=lambda content: self._decay.copy_(-content.float().exp())
        )
        yield "A_log", decay
        yield "dt_bias", WeightTarget(self._bias, (full.num_heads,), (heads,))
        yield "norm.weight", WeightTarget(self._norm, (full.value_dim,))

    def _inputs(self) -> tuple[tuple[Features, ...], tuple[Features, ...]]:
        """Outputs of the two products that the layer begins with."""
        keys, values = self._shape.key_dim, self._shape.value_dim * self._group
        if self._is_interleaved:
            mixed = (self._features("in_proj_qkvz", 2 * (keys + values)),)
            return mixed, (self._features("in_proj_ba", 2 * self._group),)
        sizes = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values}
        gates = tuple(self._features(name, self._group) for name in ("in_proj_b", "in_proj_a"))
        return tuple(self._features(name, size) for name, size in sizes.items()), gates

    def _features(self, name: str, size: int) -> Features:
        """Features of all key heads, ``size`` each."""
        own = self._own
        return Features(self._all.num_key_heads * size, range(own.start * size, own.stop * size), name)

    def _split(self, mixed: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence's inputs [T, N], and the gate [T, H V] of what it gives."""
        num_channels, count = self._shape.num_channels, len(mixed)
        if not self._is_interleaved:
            return torch.cat((mixed[:, :num_channels], gates), 1), mixed[:, num_channels:]
        keys, values = self._shape.key_dim, self._shape.value_dim * self._group
        *parts, gate = torch.split(mixed.view(count, len(self._own), -1), [keys, keys, values, values], 2)
        both = torch.split(gates.view(count, len(self._own), -1), self._group, 2)
        return torch.cat([part.reshape(count, -1) for part in (*parts, *both)], 1), gate.reshape(count, -1)

    def _channels(self) -> torch.Tensor:
        """Channels of the checkpoint that are this rank's."""
        own, full = self._own, self._all
        keys = torch.arange(own.start * full.key_dim, own.stop * full.key_dim)
        size = self._group * full.value_dim
        values = torch.arange(own.start * size, own.stop * size)
        all_keys = full.num_key_heads * full.key_dim
        return torch.cat((keys, keys + all_keys, values + 2 * all_keys))
