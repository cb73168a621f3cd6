"""A DFlash block drafter in plain torch, its parameters named as z-lab names them.

Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026 (arXiv 2602.06036). Owns shapes and
forward. Embedding and last product are the target's, not trained.

A block is the token at its anchor and masks behind it. Its queries see the target's states of all positions before the
anchor, and each other; mask k gives the distribution of token anchor + k. Many blocks of one text are computed at once.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_pair.corpus import EOS_ID
from demo_pair.model import Llama, Mlp, TrainedNorm, TrainedShape, rotate

MASK_ID = EOS_ID
"""All ids of the target's vocabulary are in use; this one begins no block, since a text ends with it."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a drafter; hidden size and vocabulary are the target's."""

    layers: tuple[int, ...]
    """Layers of the target whose states it reads: j is the stream after j layers."""
    block_size: int
    """Queries of a block at most, the token at the anchor among them."""
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


BLOCK_SHAPE = BlockShape(
    layers=(2, 8, 13), block_size=8, num_layers=3, intermediate_size=208, num_heads=4, num_kv_heads=2, head_dim=32
)


@dataclass(frozen=True, slots=True)
class Places:
    """Places of keys, and the keys that each query sees."""

    queries: tuple[Tensor, Tensor]
    """cos and sin [B, 1, Q, D] of the queries."""
    context: tuple[Tensor, Tensor]
    """cos and sin [T, D] of the target's states."""
    seen: Tensor
    """[B, 1, Q, T + Q] bool."""


class BlockAttention(nn.Module):
    """Attention of a block's queries over the target's states and the block."""

    def __init__(self, shape: BlockShape, target: TrainedShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        size = target.hidden_size
        self.q_proj = nn.Linear(size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, size, bias=False)
        self.q_norm, self.k_norm = (TrainedNorm(shape.head_dim, target.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor, places: Places) -> Tensor:  # x [B, Q, H], context [B, T, H]
        """Attention output of each query."""
        q = rotate(self.q_norm(self._split(self.q_proj(x), self.heads)), *places.queries)
        k = torch.cat([self._keys(context, places.context), self._keys(x, places.queries)], 2)
        v = torch.cat([self._split(self.v_proj(rows), self.kv_heads) for rows in (context, x)], 2)
        # Repeated, not grouped: no kernel that takes a mask and never holds all scores takes groups of heads too.
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=places.seen)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _keys(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.k_norm(self._split(self.k_proj(rows), self.kv_heads)), *angles)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)


class BlockLayer(nn.Module):
    """A decoder layer as in Qwen3, but for what attention sees."""

    def __init__(self, shape: BlockShape, target: TrainedShape) -> None:
        super().__init__()
        size, eps = target.hidden_size, target.norm_eps
        self.input_layernorm, self.post_attention_layernorm = (TrainedNorm(size, eps) for _ in range(2))
        self.self_attn = BlockAttention(shape, target)
        self.mlp = Mlp(replace(target, intermediate_size=shape.intermediate_size))

    def forward(self, x: Tensor, context: Tensor, places: Places) -> Tensor:
        """[B, Q, H] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), context, places)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class DFlash(nn.Module):
    """A drafter over a target, whose weights it reads and does not own."""

    def __init__(self, shape: BlockShape, target: Llama) -> None:
        super().__init__()
        self.shape, self._target = shape, [target]  # in a list: its parameters are not this module's
        size, eps = target.shape.hidden_size, target.shape.norm_eps
        self.fc = nn.Linear(len(shape.layers) * size, size, bias=False)
        self.hidden_norm, self.norm = (TrainedNorm(size, eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(shape, target.shape) for _ in range(shape.num_layers))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, BlockLayer):
                nn.init.zeros_(module.self_attn.o_proj.weight)
                nn.init.zeros_(module.mlp.down_proj.weight)

    @property
    def target(self) -> Llama:
        """The model that it drafts for."""
        return self._target[0]

    def forward(self, ids: Tensor, states: Tensor, anchors: Tensor, num_drafts: int) -> Tensor:
        """Logits [B, N, K, V] of K tokens after each of the ``anchors`` [B, N], positions of a text [B, T] whose states
        in the target are [B, T, F].
        """
        batch, count = anchors.shape
        tokens = torch.full((batch, count, num_drafts + 1), MASK_ID, device=ids.device)
        tokens[..., 0] = ids.gather(1, anchors)
        x = self.target.model.embed_tokens(tokens.flatten(1))
        context = self.hidden_norm(self.fc(states))
        places = self._places(anchors, num_drafts + 1, ids.shape[1])
        for layer in self.layers:
            x = layer(x, context, places)
        masks = self.norm(x).unflatten(1, (count, num_drafts + 1))[:, :, 1:]
        return functional.linear(masks, self.target.model.embed_tokens.weight)

    def _places(self, anchors: Tensor, width: int, length: int) -> Places:
        device = anchors.device
        positions = (anchors[..., None] + torch.arange(width, device=device)).flatten(1)  # [B, Q]
        before = torch.arange(length, device=device) < anchors.repeat_interleave(width, 1)[..., None]
        block = torch.arange(positions.shape[1], device=device) // width
        own = (block[:, None] == block).expand(len(anchors), -1, -1)
        cos, sin = self.target.cos, self.target.sin
        return Places(
            (cos[positions][:, None], sin[positions][:, None]),
            (cos[:length], sin[:length]),
            torch.cat([before, own], -1)[:, None],
        )
