"""The decoder: embedding, attention and MLP layers, norm and head, over a paged cache.

Owns the parameters and the order of computation. What architectures do differently is read from ``ModelConfig``.
Refuses to know files, sequences and page tables: a forward gets tensors and attention plans, ready made.

Queries, keys and values come from one product, gate and up from another. Turning happens in place inside the fused
product, so that a token's key and value stay side by side and are stored at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.engine.kernels.kv_store import store_kv
from outrider.engine.kernels.paged_attention import AttentionPlan, paged_attention
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.linear import Linear
from outrider.engine.models.norm import RmsNorm
from outrider.engine.models.rope import RotaryEmbedding, rotate


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A forward's inputs on the device, prepared once for all layers."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64
    plans: dict[int | None, AttentionPlan]
    """By sliding window."""
    logit_indices: torch.Tensor  # [N] int64


@dataclass(frozen=True, slots=True)
class _Angles:
    cos: torch.Tensor  # [T, 1, D]
    sin: torch.Tensor  # [T, 1, D] signed


class Attention:
    """One layer's attention."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self._query_size = config.num_heads * config.head_dim
        self._head_dim = config.head_dim
        self._num_kv_heads = config.num_kv_heads
        self._eps = config.rms_norm_eps
        self.window = config.sliding_windows[layer]
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias, dtype=dtype, device=device)
        self.output = Linear(self._query_size, config.hidden_size, bias=config.output_bias, dtype=dtype, device=device)
        # One weight a head, the queries' then the keys', so that both are normalised in one go.
        turned = config.num_heads + config.num_kv_heads
        self.qk_norm = torch.empty(turned, config.head_dim, dtype=dtype, device=device) if config.qk_norm else None

    def __call__(self, x: torch.Tensor, kv: torch.Tensor, angles: _Angles, batch: DeviceBatch) -> torch.Tensor:
        """``x`` [T, hidden] over one layer's ``kv`` [S, 2, H_kv, D]; stores the tokens' own keys and values first."""
        qkv = self.qkv(x)
        heads = qkv.view(x.shape[0], -1, self._head_dim)  # [T, H + 2 H_kv, D]
        self._turn(heads.narrow(1, 0, heads.shape[1] - self._num_kv_heads), angles)
        num_heads = self._query_size // self._head_dim
        store_kv(kv, batch.slots, heads[:, num_heads:].view(-1, 2, self._num_kv_heads, self._head_dim))
        attended = paged_attention(heads.narrow(1, 0, num_heads), kv, batch.plans[self.window])
        return self.output(attended.reshape(x.shape[0], self._query_size))

    def _turn(self, queries_keys: torch.Tensor, angles: _Angles) -> None:
        heads = queries_keys
        if self.qk_norm is not None:
            heads = F.rms_norm(queries_keys, (self._head_dim,), eps=self._eps).mul_(self.qk_norm)
        rotate(heads, angles.cos, angles.sin, out=queries_keys)


class Mlp:
    """One layer's gated MLP."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(hidden, 2 * inner, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(inner, hidden, bias=config.mlp_bias, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, hidden] to the same shape."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))


class DecoderLayer:
    """Attention and MLP, each normalised before and added after."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self.attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype, device)
        self.mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = Mlp(config, dtype, device)

    def __call__(self, hidden: torch.Tensor, kv: torch.Tensor, angles: _Angles, batch: DeviceBatch) -> None:
        """Change ``hidden`` [T, hidden] in place."""
        hidden.add_(self.attention(self.attention_norm(hidden), kv, angles, batch))
        hidden.add_(self.mlp(self.mlp_norm(hidden)))


class Decoder:
    """A whole model, its parameters uninitialised until they are loaded."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, layer, dtype, device) for layer in range(config.num_layers)]
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=dtype,
            device=device,
            tied_to=self.embedding if config.tied_embeddings else None,
        )
        self._rotary = RotaryEmbedding(
            config.rope, head_dim=config.head_dim, max_position=config.max_position, device=device
        )

    def __call__(self, batch: DeviceBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Run the batch over ``kv_cache`` [L, S, 2, H_kv, D]; returns logits [N, V] float32 of
        ``batch.logit_indices``.
        """
        hidden = F.embedding(batch.token_ids, self.embedding)  # [T, hidden]
        angles = _Angles(*self._rotary.cos_sin(batch.positions, self.dtype))
        for layer, kv in zip(self.layers, kv_cache.unbind(0), strict=True):
            layer(hidden, kv, angles, batch)
        if not batch.logit_indices.numel():
            return torch.empty(0, self.config.vocab_size, device=self.device)
        return self.head(self.norm(hidden.index_select(0, batch.logit_indices))).float()
