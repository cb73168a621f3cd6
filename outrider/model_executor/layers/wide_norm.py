"""Normalization of queries and keys over all heads together, of which each rank holds some."""

from __future__ import annotations

import torch

from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import Weights, WeightTarget
from outrider.model_executor.layers.norm import RmsNorm


class WideNorm:
    """RMS norm of the queries of a token, and of its keys, in a fused query, key and value product."""

    def __init__(self, context: LayerContext) -> None:
        config, shard = context.config, context.communicator.shard
        self._communicator = context.communicator
        self._parts = [
            _NormShard(context, "q_norm", config.num_heads, shard.heads(config)),
            _NormShard(context, "k_norm", config.num_kv_heads, shard.kv_heads(config)),
        ]

    def __call__(self, qkv: torch.Tensor) -> None:
        """Normalize queries and keys of ``qkv`` [T, (H + 2 H_kv) * D] in place."""
        queries, keys = self._parts
        rows = qkv[:, : queries.width], qkv[:, queries.width : queries.width + keys.width]
        if self._communicator.shard.size == 1:
            for part, own in zip(self._parts, rows, strict=True):
                own.copy_(part.norm(own))
            return
        squares = [part.mean_squares(own) for part, own in zip(self._parts, rows, strict=True)]
        # Sums of ranks have a multiple of 16 bytes.
        means = self._communicator.all_reduce(torch.stack((*squares, *squares), dim=1))  # [T, 4]
        for place, (part, own) in enumerate(zip(self._parts, rows, strict=True)):
            own.copy_(part.scaled(own, means[:, place, None]))

    def weights(self) -> Weights:
        """Weights of both norms, or the rank's parts of them."""
        for part in self._parts:
            yield f"{part.name}.weight", part.target


class _NormShard:
    """Norm of queries or of keys."""

    def __init__(self, context: LayerContext, name: str, num_heads: int, own: range) -> None:
        config, size = context.config, context.config.head_dim
        self.name, self.width, self._all = name, len(own) * size, num_heads * size
        self._copies = context.communicator.shard.size * len(own) / num_heads
        self.norm = RmsNorm(self.width, config.rms_norm_eps, dtype=context.dtype, device=context.device)
        part = (slice(own.start * size, own.stop * size),)
        self.target = WeightTarget(self.norm.weight, (self._all,), part)

    def mean_squares(self, rows: torch.Tensor) -> torch.Tensor:
        """Share of this rank in the mean square of ``rows`` [T, N]: [T] float32."""
        return rows.float().square().sum(-1) / (self._all * self._copies)

    def scaled(self, rows: torch.Tensor, mean_squares: torch.Tensor) -> torch.Tensor:
        """``rows`` [T, N] normalized by those of all ranks, [T, 1]."""
        return rows.float() * torch.rsqrt(mean_squares + self.norm.eps) * self.norm.weight.float()
