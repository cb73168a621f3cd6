"""Dense random matrices of a synthetic head, each from its name and seed alone."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from outrider.model_executor.synthetic.weights import BRANCH_RMS
from synthetic_pair.shapes import Shape


@dataclass(frozen=True, slots=True)
class RandomMatrices:
    """Random matrices of one head; ``method`` keeps those of different heads apart."""

    method: str
    seed: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, name: str, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """A matrix that turns input of mean square 1 into output of root mean square ``gain``."""
        seed = zlib.crc32(f"{self.method}.{name}".encode()) ^ (self.seed << 32)
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(rows, columns, dtype=self.dtype, device=self.device, generator=generator)
        return values.mul_(gain / columns**0.5)

    def unit_vectors(self, name: str, count: int, size: int) -> torch.Tensor:
        """[count, size] float32, orthonormal."""
        found: torch.Tensor = torch.linalg.qr(self(name, count, size).float().T).Q.T.contiguous()
        return found

    def feed_forward(self, shape: Shape, prefix: str = "", gain: float = BRANCH_RMS) -> dict[str, torch.Tensor]:
        """The gated feed-forward block of a layer, which adds ``gain`` to the stream."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        return {
            f"{prefix}mlp.gate_proj.weight": self(f"{prefix}gate", inner, hidden),
            f"{prefix}mlp.up_proj.weight": self(f"{prefix}up", inner, hidden),
            f"{prefix}mlp.down_proj.weight": self(f"{prefix}down", hidden, inner, gain),
        }

    def attention(self, shape: Shape, prefix: str = "", gain: float = BRANCH_RMS) -> dict[str, torch.Tensor]:
        """The projections of a layer's attention, which adds ``gain`` to the stream."""
        hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        return {
            f"{prefix}self_attn.q_proj.weight": self(f"{prefix}q", queries, hidden),
            f"{prefix}self_attn.k_proj.weight": self(f"{prefix}k", keys, hidden),
            f"{prefix}self_attn.v_proj.weight": self(f"{prefix}v", keys, hidden),
            f"{prefix}self_attn.o_proj.weight": self(f"{prefix}o", hidden, queries, gain),
        }

    def ones(self, size: int) -> torch.Tensor:
        """A norm's weight."""
        return torch.ones(size, dtype=self.dtype, device=self.device)
