"""EAGLE and MTP read from their papers in plain PyTorch, float32, and random heads in the published layouts."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.tiny_models import cached_tiny_model, load_reference

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 48, 4, 2, 8, 272
EPS, THETA = 1e-5, 10000.0
MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
EAGLE_CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "vocab_size": VOCABULARY,
    "model_type": "llama",
    "rope_theta": THETA,
}


class _Noise:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 0.25) -> Tensor:
        """A random matrix, or a norm's weight near 1."""
        return scale * torch.randn(*shape, generator=self._generator) + float(len(shape) == 1)

    def layer(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}{name}.weight": self(*shape) for name, shape in MATRICES.items()}


def build_eagle(
    folder: Path,
    *,
    speculators: bool = False,
    bias: bool = False,
    qkv_bias: bool = False,
    own_embedding: bool = False,
    reverse: bool = False,
    **changes: Any,
) -> Path:
    """Write a random EAGLE head; ``reverse`` brings a head of its own, the other way round than any target's."""
    noise = _Noise(7)
    layer, fc = ("transformer.", "fusion_fc") if speculators else ("layers.0.", "fc")
    tensors = {
        f"{fc}.weight": noise(HIDDEN, 2 * HIDDEN),
        f"{layer}post_attention_layernorm.weight": noise(HIDDEN),
        **noise.layer(layer),
    }
    if bias:
        tensors[f"{fc}.bias"] = noise(HIDDEN, 1)[:, 0].clone()
    if qkv_bias:
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        tensors |= {f"{layer}self_attn.{name}_proj.bias": noise(size, 1)[:, 0].clone() for name, size in rows.items()}
    if own_embedding:
        tensors["embed_tokens.weight"] = noise(VOCABULARY, HIDDEN)
    if reverse:
        tensors["lm_head.weight"] = noise(VOCABULARY, HIDDEN, scale=-1.0)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **EAGLE_CONFIG, "qkv_bias": qkv_bias}
    if speculators:
        config = {
            "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "speculators_model_type": "eagle",
            "layernorms": False, "fusion_bias": bias, "transformer_layer_config": EAGLE_CONFIG,
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


def build_mimo(folder: Path, *, num_layers: int = 1, seed: int = 1, **config: Any) -> Path:
    """Write a random target with a Qwen2 body and MTP layers, as MiMo-7B has them."""
    body = cached_tiny_model("qwen2", seed=seed, **config)
    shutil.copytree(body, folder)
    tensors, noise = load_file(body / "model.safetensors"), _Noise(3)
    for index in range(num_layers):
        prefix = f"model.mtp_layers.{index}."
        tensors |= noise.layer(prefix) | {f"{prefix}input_proj.weight": noise(HIDDEN, 2 * HIDDEN)}
        for name in MTP_NORMS:
            tensors[f"{prefix}{name}.weight"] = noise(HIDDEN)
        for name, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = noise(rows, 1)[:, 0].clone()
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    described = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": num_layers}
    path.write_text(json.dumps({**json.loads(path.read_text()), **described, "auto_map": {"AutoConfig": "x.Y"}}))
    return folder


MTP_NORMS = (
    "token_layernorm",
    "hidden_layernorm",
    "input_layernorm",
    "post_attention_layernorm",
    "final_layernorm",
)


class PairReference(ABC):
    """A head and its target, a model of transformers. Every draft is computed from the whole text anew."""

    def __init__(self, weights: dict[str, Tensor], target: Path) -> None:
        self.w = weights
        self.target: Any = load_reference(target)
        self.embedding: Tensor = weights.get("embed_tokens.weight", self.target.model.embed_tokens.weight.detach())
        self.head: Tensor = weights.get("lm_head.weight", self.target.lm_head.weight.detach())

    def draft(self, text: list[int], count: int) -> list[int]:
        """``count`` tokens after the text, the likeliest each."""
        return self.draft_with_states(text, count)[0]

    @torch.no_grad()
    def draft_with_states(self, text: list[int], count: int) -> tuple[list[int], Tensor]:
        """Tokens and the head's state [count, H] that each was drawn from."""
        states = self.target.model(torch.tensor([text])).last_hidden_state[0][:-1]  # [n - 1, H] normalised
        tokens, drafted = list(text[1:]), []
        for _ in range(count):
            following = self.run(self.embedding[torch.tensor(tokens)], states)
            drafted.append(int(F.linear(following[-1], self.head)[:257].argmax()))
            tokens.append(drafted[-1])
            states = torch.cat([states, following[-1:]])
        return drafted, states[len(text) - 1 :]

    @abstractmethod
    def run(self, embeds: Tensor, states: Tensor) -> Tensor:  # [n, H] each
        """The head's own states [n, H]."""

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self.w[f"{name}.weight"], EPS)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden, "post_attention_layernorm")
        gated = F.silu(self.linear(x, "mlp.gate_proj")) * self.linear(x, "mlp.up_proj")
        return hidden + self.linear(gated, "mlp.down_proj")

    def attention(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        q, k, v = (self.linear(x, f"self_attn.{name}_proj").view(count, -1, HEAD_DIM).transpose(0, 1) for name in "qkv")
        q, k = turned(q), turned(k)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
        scores = (q @ k.transpose(1, 2)) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        return self.linear(attended, "self_attn.o_proj")


def turned(x: Tensor) -> Tensor:  # [heads, n, D]
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class EagleReference(PairReference):
    """Li et al., 2024, section 4.1: fc, then a decoder layer without its first norm."""

    def __init__(self, folder: Path, target: Path) -> None:
        written = (("fusion_fc.", "fc."), ("transformer.", ""), ("layers.0.", ""))
        weights = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            for old, new in written:
                name = name.replace(old, new)  # noqa: PLW2901
            weights[name] = tensor
        super().__init__(weights, target)

    def run(self, embeds: Tensor, states: Tensor) -> Tensor:
        x = self.linear(torch.cat([embeds, states], dim=-1), "fc")
        return self.feed_forward(x + self.attention(x))


class MtpReference(PairReference):
    """vLLM's ``mimo_mtp.py``; ``body`` is the target as a Qwen2."""

    def __init__(self, folder: Path, body: Path) -> None:
        prefix = "model.mtp_layers.0."
        stored = load_file(folder / "model.safetensors")
        super().__init__({name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}, body)

    def run(self, embeds: Tensor, states: Tensor) -> Tensor:
        embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
        joined = torch.cat([self.norm(states, "hidden_layernorm"), self.norm(embeds, "token_layernorm")], dim=-1)
        x = self.linear(joined, "input_proj")
        hidden = x + self.attention(self.norm(x, "input_layernorm"))
        return self.norm(self.feed_forward(hidden), "final_layernorm")
