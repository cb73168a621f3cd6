"""A Llama in plain torch, its parameters named as the Hugging Face layout names them.

Owns shapes, forward and a cache for sampling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class TrainedShape:
    """Sizes of one model; embeddings are always tied."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 2048
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer, filled up to `length`."""

    keys: Tensor  # [B, H_kv, P, D]
    values: Tensor  # [B, H_kv, P, D]
    length: int = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [B, H_kv, T, D]; all that is held now comes back."""
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


Cache = list[LayerCache]


def empty_cache(shape: TrainedShape, batch: int, positions: int, device: torch.device, dtype: torch.dtype) -> Cache:
    """Room for `positions` tokens of `batch` rows in every layer."""
    size = (batch, shape.num_kv_heads, positions, shape.head_dim)

    def room() -> Tensor:
        return torch.empty(size, device=device, dtype=dtype)

    return [LayerCache(room(), room()) for _ in range(shape.num_layers)]


class TrainedNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        """Scale each vector to unit mean square, times the weight."""
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, D] by cos and sin [T, D]; halves are paired, not neighbours."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class TrainedAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: TrainedShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None) -> Tensor:  # [B, T, D]
        """Attention of each position to those before it and itself; with a cache, also to those it holds."""
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(k, v)
        # With a cache only two cases occur: a whole prompt into an empty cache, or a single new token.
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Gated feed-forward."""

    def __init__(self, shape: TrainedShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        """Feed-forward output of each position."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and feed-forward, each on a residual; dropout acts on what is added."""

    def __init__(self, shape: TrainedShape) -> None:
        super().__init__()
        self.self_attn = TrainedAttention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = TrainedNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = TrainedNorm(shape.hidden_size, shape.norm_eps)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None) -> Tensor:  # [B, T, D]
        """One layer."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, cache))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Layers below the head: the `model.` prefix of the published names."""

    def __init__(self, shape: TrainedShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = TrainedNorm(shape.hidden_size, shape.norm_eps)
        self.dropout = nn.Dropout(0.0)


class Llama(nn.Module):
    """The whole model; the head is the embedding matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: TrainedShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions).float(), inverse).repeat(1, 2)  # [P, D]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(_initialise)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [B, T, V] of ids [B, T], which follow what `cache` holds."""
        start = cache[0].length if cache is not None else 0
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        x = self.model.dropout(self.model.embed_tokens(ids))
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, cache[index] if cache is not None else None)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def set_dropout(self, share: float) -> None:
        """Drop this share of every residual addition while training."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = share


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    # What each layer adds starts at nothing: deep stacks then train from the first step.
    if isinstance(module, TrainedAttention):
        nn.init.zeros_(module.o_proj.weight)
    if isinstance(module, Mlp):
        nn.init.zeros_(module.down_proj.weight)


TARGET_SHAPE = TrainedShape(
    num_layers=16, hidden_size=320, intermediate_size=672, num_heads=8, num_kv_heads=4, head_dim=32
)  # fmt: skip
DRAFT_SHAPES = {
    "narrow": TrainedShape(
        num_layers=2, hidden_size=256, intermediate_size=704, num_heads=8, num_kv_heads=4, head_dim=32
    ),
    "middle": TrainedShape(
        num_layers=2, hidden_size=320, intermediate_size=832, num_heads=10, num_kv_heads=5, head_dim=32
    ),
}
