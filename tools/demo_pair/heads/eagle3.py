"""An EAGLE-3 head in plain torch, its parameters named as SafeAILab names them, and its training-time test.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025.
Owns shapes and forward. The embedding is the target's, not trained; the last product
begins as the target's.

Pair p is token p + 1 beside the target's states of position p; it predicts token p + 2. Step j of the training-time
test computes pair t + j in column t from the head's own state of step j - 1: it attends to the pairs 0 to t of step 0,
and to its own column's of the steps between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_pair.model import Llama, Mlp, TrainedNorm, TrainedShape, rotate

NUM_STEPS = 5
"""Steps of the training-time test: draft tokens in a row that the head learns to predict."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head; hidden size and vocabulary are the target's."""

    layers: tuple[int, ...]
    """Layers of the target whose states it reads: j is the stream after j layers."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


HEAD_SHAPE = HeadShape(layers=(2, 8, 13), intermediate_size=320, num_heads=8, num_kv_heads=2, head_dim=32)


@dataclass(slots=True)
class Steps:
    """Keys and values of the steps so far, [B, H, n, D] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def padded(self) -> "Past | None":
        """Keys and values that a step attends to besides its own; None before step 0.

        Steps to come are zeros with a bias of minus infinity, so that one compilation serves all steps but the first.
        """
        if not self.keys:
            return None
        num_later = max(0, NUM_STEPS - 1 - len(self.keys))
        # One tensor twice, or one without a gradient, would be compiled anew.
        learns = self.keys[0].requires_grad
        later = [torch.zeros_like(self.keys[0]).requires_grad_(learns) for _ in range(2 * num_later)]
        return (
            [*self.keys, *later[:num_later]],
            [*self.values, *later[num_later:]],
            _bias(len(self.keys) - 1, num_later, self.keys[0].device),
        )


@cache
def _bias(num_past: int, num_later: int, device: torch.device) -> Tensor:
    """Made once, since a captured step may not copy from the host.  # [num_past + num_later]"""
    return torch.tensor([0.0] * num_past + [float("-inf")] * num_later, device=device)


Past = tuple[list[Tensor], list[Tensor], Tensor]
"""Keys and values [B, H, n, D] of step 0 and of the steps after it, and a bias for each of those."""


class HeadAttention(nn.Module):
    """Attention of one step of the training-time test."""

    def __init__(self, shape: HeadShape, hidden_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.q_proj = nn.Linear(2 * hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | None) -> tuple[Tensor, Tensor, Tensor]:
        """Attention output of each column of x [B, n, 2 H], and its keys and values; cos and sin [n, D]."""
        q = rotate(self._split(self.q_proj(x), self.heads), cos, sin)
        k = rotate(self._split(self.k_proj(x), self.kv_heads), cos, sin)
        k = k.repeat_interleave(self.heads // self.kv_heads, 1)
        v = self._split(self.v_proj(x), self.kv_heads).repeat_interleave(self.heads // self.kv_heads, 1)
        if past is None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            keys, values, bias = past
            out = self._over_steps(q, [*keys, k], [*values, v], functional.pad(bias, (0, 1)))
        return self.o_proj(out.transpose(1, 2).flatten(2)), k, v

    def _over_steps(self, q: Tensor, keys: list[Tensor], values: list[Tensor], bias: Tensor) -> Tensor:
        count, scale = q.shape[2], self.head_dim**-0.5
        later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        scores = ((q @ keys[0].mT).float() * scale).masked_fill(later, float("-inf"))
        own = torch.stack([(q.float() * each).sum(-1) for each in keys[1:]], -1) * scale + bias  # [B, H, n, j]
        most = torch.maximum(scores.amax(-1, keepdim=True), own.amax(-1, keepdim=True)).detach()
        shares, own_shares = (scores - most).exp(), (own - most).exp()
        out = shares.to(q.dtype) @ values[0]
        for place, each in enumerate(values[1:]):
            out = out + own_shares[..., place, None] * each
        total: Tensor = shares.sum(-1, keepdim=True) + own_shares.sum(-1, keepdim=True)
        return (out / total).to(q.dtype)  # type: ignore[no-any-return]

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)


class HeadLayer(nn.Module):
    """The decoder layer: attention over embedding and state, feed-forward over the sum."""

    def __init__(self, shape: HeadShape, target: TrainedShape) -> None:
        super().__init__()
        size, eps = target.hidden_size, target.norm_eps
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            TrainedNorm(size, eps) for _ in range(3)
        )
        self.self_attn = HeadAttention(shape, size)
        self.mlp = Mlp(replace(target, intermediate_size=shape.intermediate_size))

    def forward(
        self, embeds: Tensor, states: Tensor, cos: Tensor, sin: Tensor, past: Past | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, n, H] each to the next states, and this step's keys and values."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(states)], -1)
        gathered, keys, values = self.self_attn(x, cos, sin, past)
        states = states + gathered
        return states + self.mlp(self.post_attention_layernorm(states)), keys, values


class Eagle3(nn.Module):
    """A head over a target, whose weights it reads and does not own."""

    def __init__(self, shape: HeadShape, target: Llama) -> None:
        super().__init__()
        self.shape, self._target = shape, [target]  # in a list: its parameters are not this module's
        size = target.shape.hidden_size
        self.fc = nn.Linear(len(shape.layers) * size, size, bias=False)
        self.midlayer = HeadLayer(shape, target.shape)
        self.norm = TrainedNorm(size, target.shape.norm_eps)
        self.lm_head = nn.Linear(size, target.shape.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.midlayer.self_attn.o_proj.weight)
        nn.init.zeros_(self.midlayer.mlp.down_proj.weight)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.model.embed_tokens.weight)

    @property
    def target(self) -> Llama:
        """The model that it drafts for."""
        return self._target[0]

    def step(self, number: int, tokens: Tensor, states: Tensor, steps: Steps) -> Tensor:
        """Step ``number`` of the training-time test over columns: ``tokens`` [B, n] of its pairs, ``states`` [B, n, H]
        fused or of the step before; the next states.
        """
        end = number + tokens.shape[1]
        cos, sin = self.target.cos[number:end], self.target.sin[number:end]
        embeds = self.target.model.embed_tokens(tokens)
        states, keys, values = self.midlayer(embeds, states, cos, sin, steps.padded())
        steps.keys.append(keys)
        steps.values.append(values)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[B, n, H] to [B, n, V]."""
        return self.lm_head(self.norm(states))  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, states: Tensor) -> list[Tensor]:
        """Logits [B, n, V] of each step over a text [B, T] and the target's states [B, T, F], n = T - NUM_STEPS. Step
        j, column t, is about token t + j + 2.
        """
        count, steps = ids.shape[1] - NUM_STEPS, Steps()
        hidden = self.fc(states[:, :count])
        found = []
        for number in range(NUM_STEPS):
            hidden = self.step(number, ids[:, number + 1 : number + 1 + count], hidden, steps)
            found.append(self.logits(hidden))
        return found


@torch.no_grad()
def read_target(target: Llama, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """States [B, T, F] of the layers, side by side, and logits [B, T, V] of a text."""
    cos, sin = target.cos[: ids.shape[1]], target.sin[: ids.shape[1]]
    x = target.model.embed_tokens(ids)
    found = {0: x}
    for number, layer in enumerate(target.model.layers, 1):
        x = layer(x, cos, sin, None)
        if number in layers:
            found[number] = x
    return torch.cat([found[layer] for layer in layers], -1), functional.linear(
        target.model.norm(x), target.model.embed_tokens.weight
    )
