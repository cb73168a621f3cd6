"""The sizes of real models, and of tiny ones for tests.

Owns what stands in `config.json`. Knows no weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

LLAMA3_ROPE_SCALING: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mimo": "MiMoForCausalLM"}


@dataclass(frozen=True, slots=True)
class Shape:
    """One decoder's sizes. Embedding and head are always two matrices: see `config`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-5

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys have norms of their own."""
        return self.model_type == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return self.model_type == "mimo"

    @property
    def num_parameters(self) -> int:
        """Weights in all, norms left out."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + 2 * self.vocab_size * self.hidden_size

    def config(self, dtype: str) -> dict[str, Any]:
        """`config.json`, in the keys that every release of transformers reads.

        Embeddings are never tied, though those of some real models are: a tied head's likeliest token is the one it
        was given. A forward reads the head once either way; only the memory differs. There is no end token, so
        generation always runs to the length that was asked for.
        """
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "torch_dtype": dtype,
            **({"num_nextn_predict_layers": 1} if self.model_type == "mimo" else {}),
        }

    def with_mtp(self) -> Shape:
        """The same sizes as a target with an MTP layer: MiMo's architecture, whose rope is not stretched."""
        return dataclasses.replace(self, model_type="mimo", rope_scaling=None)


_LLAMA = Shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 500000.0, LLAMA3_ROPE_SCALING)
_QWEN3 = Shape("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, 1000000.0, rms_norm_eps=1e-6)
_TINY = Shape("llama", 1024, 128, 192, 3, 4, 2, 32, 2048, 10000.0)


def _like(shape: Shape, hidden: int, intermediate: int, layers: int, num_heads: int, *, head_dim: int = 128) -> Shape:
    return dataclasses.replace(
        shape,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=num_heads,
        head_dim=head_dim,
    )


SHAPES: dict[str, Shape] = {
    "llama-8b": _LLAMA,
    "llama-1b": _like(_LLAMA, 2048, 8192, 16, 32, head_dim=64),
    "llama-3b": _like(_LLAMA, 3072, 8192, 28, 24),
    "llama-70b": _like(_LLAMA, 8192, 28672, 80, 64),
    "qwen3-0.6b": _like(_QWEN3, 1024, 3072, 28, 16),
    "qwen3-8b": _QWEN3,
    "qwen3-32b": _like(_QWEN3, 5120, 25600, 64, 64),
    "tiny-llama": _TINY,
    "tiny-qwen3": dataclasses.replace(_TINY, model_type="qwen3", rms_norm_eps=1e-6),
    "tiny-llama-draft": dataclasses.replace(_TINY, num_layers=1),
    "tiny-qwen3-draft": dataclasses.replace(_TINY, model_type="qwen3", rms_norm_eps=1e-6, num_layers=1),
}
_SHORT = {
    "8b": "llama-8b",
    "1b": "llama-1b",
    "3b": "llama-3b",
    "70b": "llama-70b",
    "32b": "qwen3-32b",
    "0.6b": "qwen3-0.6b",
    "tiny": "tiny-llama",
    "tiny-draft": "tiny-llama-draft",
}


def find_shape(name: str) -> Shape:
    """The shape of a name, short or long, in either case; `ValueError` lists them all."""
    key = name.lower()
    try:
        return SHAPES[_SHORT.get(key, key)]
    except KeyError:
        known = ", ".join([*SHAPES, *(short.upper() for short in _SHORT)])
        raise ValueError(f"{name!r} is no shape; there are {known}") from None
