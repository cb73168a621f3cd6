"""The weights of a synthetic model, tensor by tensor in Hugging Face names.

Owns the arithmetic that makes the next token a function of the last one: embeddings are large, all branches of the
residual stream add next to nothing to them, and a row of the head is the embedding of the token before it. All matrices
are dense and random, nothing is zero. Made one tensor at a time, on any device, so that a model that is too large for a
disk can be filled where it is used. Knows no files.

With h the normalised embedding of t (mean square 1) the logit of the token that follows t is PEAK, that of any other is
noise of standard deviation PEAK / sqrt(hidden size): at most 3 and seldom over 9 for the tiny shapes, under 1 for real
ones. bfloat16 rounds a logit of 32 by 0.125, far below the margin.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.model_executor.synthetic.cycle import TokenIds

PEAK = 32.0
"""The likeliest token's logit."""
SECOND = 0.618034
"""A foreseen token's logit, over PEAK. Near no ratio of small numbers, so that two bfloat16 values never cancel."""
EMBEDDING_RMS = 8.0
"""Root mean square of an embedding, large beside what all branches add."""
BRANCH_RMS = 0.05
"""Root mean square of what all branches together may add to the residual stream."""


class Sizes(Protocol):
    """Sizes of a decoder; ``outrider.model_executor.models.ModelConfig`` has them."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width inside the MLP."""
        ...

    @property
    def num_layers(self) -> int:
        """L."""
        ...

    @property
    def num_heads(self) -> int:
        """H."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        ...

    @property
    def head_dim(self) -> int:
        """D."""
        ...

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys have norms of their own."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        ...


@dataclass(frozen=True, slots=True)
class Successors:
    """Next token of a model, for every token."""

    first: TokenIds  # [V] the likeliest next token, by token
    second: TokenIds  # [V] the second likeliest, by token; -1 where there is none of note


@dataclass(frozen=True, slots=True)
class WeightMaker:
    """Makes the tensors of one model; the same arguments give the same weights on the same device type."""

    sizes: Sizes
    successors: Successors
    seed: int
    dtype: torch.dtype
    device: torch.device

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every weight, in the order of a forward. Only embedding and head are alive at once."""
        embedding = self._random(
            "model.embed_tokens.weight", self.sizes.vocab_size, self.sizes.hidden_size, EMBEDDING_RMS
        )
        yield "model.embed_tokens.weight", embedding
        for layer in range(self.sizes.num_layers):
            yield from self._layer(f"model.layers.{layer}")
        yield "model.norm.weight", self._ones(self.sizes.hidden_size)
        yield "lm_head.weight", self._head(embedding)

    def _layer(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        sizes = self.sizes
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        small = BRANCH_RMS / (2 * sizes.num_layers) ** 0.5
        yield f"{name}.input_layernorm.weight", self._ones(hidden)
        yield self._matrix(f"{name}.self_attn.q_proj.weight", queries, hidden)
        yield self._matrix(f"{name}.self_attn.k_proj.weight", keys, hidden)
        yield self._matrix(f"{name}.self_attn.v_proj.weight", keys, hidden)
        if sizes.qkv_bias:
            for part, size in (("q", queries), ("k", keys), ("v", keys)):
                bias = f"{name}.self_attn.{part}_proj.bias"
                yield bias, self._random(bias, 1, size, BRANCH_RMS)[0]
        if sizes.qk_norm:
            yield f"{name}.self_attn.q_norm.weight", self._ones(sizes.head_dim)
            yield f"{name}.self_attn.k_norm.weight", self._ones(sizes.head_dim)
        yield self._matrix(f"{name}.self_attn.o_proj.weight", hidden, queries, small)
        yield f"{name}.post_attention_layernorm.weight", self._ones(hidden)
        yield self._matrix(f"{name}.mlp.gate_proj.weight", inner, hidden)
        yield self._matrix(f"{name}.mlp.up_proj.weight", inner, hidden)
        yield self._matrix(f"{name}.mlp.down_proj.weight", hidden, inner, small)

    def _matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> tuple[str, torch.Tensor]:
        """A matrix that turns input of mean square 1 into output of root mean square `gain`."""
        return name, self._random(name, rows, columns, gain / columns**0.5)

    def _random(self, name: str, rows: int, columns: int, scale: float) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) ^ (self.seed << 32))
        values = torch.randn(rows, columns, dtype=self.dtype, device=self.device, generator=generator)
        return values.mul_(scale)

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def _head(self, embedding: torch.Tensor) -> torch.Tensor:
        """[V, H] row n is the embedding of the token that n follows, plus a part of the one it is second to."""
        head = rows_after(embedding, torch.from_numpy(self.successors.first))
        second = torch.from_numpy(self.successors.second)
        given = torch.nonzero(second >= 0).flatten().to(self.device)
        rows = second.to(self.device)[given]
        # Summed in float32: in bfloat16 the two may cancel to an exact zero.
        head[rows] = (head[rows].float() + SECOND * embedding[given].float()).to(self.dtype)
        return head.mul_(PEAK / (EMBEDDING_RMS * self.sizes.hidden_size))


def rows_after(embedding: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """[V, H] row n is the sum of the rows [V, H] of all tokens that n follows: of one, where ``first`` is a
    permutation.
    """
    size = len(first)
    if len(torch.unique(first)) == size:
        before = torch.empty(size, dtype=torch.long)
        before[first] = torch.arange(size)
        return embedding[before.to(embedding.device)]
    summed = torch.zeros(embedding.shape, dtype=torch.float32, device=embedding.device)
    return summed.index_add_(0, first.to(embedding.device), embedding.float()).to(embedding.dtype)
