"""EAGLE-3 read from its paper in plain PyTorch, float32, and random heads in both published layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.tiny_models import load_reference

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
LAYERS = [0, 1, 2]
THETA, EPS = 10000.0, 1e-5
_LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "vocab_size": 272,
    "model_type": "llama",
    "rope_theta": THETA,
}


def build_eagle3(
    folder: Path,
    *,
    speculators: bool = False,
    norm_before_residual: bool = False,
    norms: Sequence[str] = (),
    draft_vocab_size: int = 96,
    seed: int = 0,
    reverse: bool = False,
    **changes: Any,
) -> Path:
    """Write a random head; ``reverse`` turns its last product round. ``norms``: those that newer heads have."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return 0.25 * torch.randn(*shape, generator=generator) + float(len(shape) == 1)

    prefix = "layers.0." if speculators else "midlayer."
    tensors = {
        "fc.weight": noise(HIDDEN, 3 * HIDDEN),
        "norm.weight": noise(HIDDEN),
        "lm_head.weight": noise(draft_vocab_size, HIDDEN) * (-4 if reverse else 4),
        **{f"{prefix}{name}.weight": noise(HIDDEN) for name in NORMS},
        **{f"{prefix}{name}.weight": noise(*shape) for name, shape in MATRICES.items()},
    }
    if draft_vocab_size != 272:
        chosen = torch.randperm(256, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(272, dtype=torch.bool).index_fill_(0, chosen, value=True)
    if "norm_before_fc" in norms:
        tensors["input_norm.weight"] = noise(3 * HIDDEN)
    if "fc_norm" in norms:
        tensors |= {f"fc_norm.{place}.weight": noise(HIDDEN) for place in range(3)}
    if speculators:
        tensors["embed_tokens.weight"] = noise(272, HIDDEN)
    config = {
        "architectures": ["Eagle3Speculator" if speculators else "LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "norm_before_residual": norm_before_residual,
        **dict.fromkeys(norms, True),
        **({"transformer_layer_config": _LAYER, "target_hidden_size": None} if speculators else _LAYER),
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def fit_eagle3(folder: Path, target: Path, texts: list[list[int]], *, num_steps: int = 80) -> None:
    """Train the head of a folder on a few texts until it knows them by heart."""
    reference = Eagle3Reference(folder, target)
    embedding = {"embed_tokens.weight", "d2t", "t2d"}
    trained = [tensor.requires_grad_() for name, tensor in reference.w.items() if name not in embedding]
    optimizer = torch.optim.Adam(trained, lr=0.02)
    with torch.no_grad():
        states = [reference.states(text)[:-2] for text in texts]
    for _ in range(num_steps):
        loss = torch.zeros(())
        for text, known in zip(texts, states, strict=True):
            embeds = reference.embedding[torch.tensor(text[1:-1])]
            hidden = reference.layer(embeds, F.linear(known, reference.w["fc.weight"]))
            logits = F.linear(reference.norm(hidden, "norm"), reference.w["lm_head.weight"])
            loss = loss + F.cross_entropy(logits, torch.tensor(text[2:]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save_file({name: tensor.detach() for name, tensor in reference.w.items()}, folder / "model.safetensors")


class Eagle3Reference:
    """A head and its target. Every draft is computed from the whole text anew."""

    def __init__(self, folder: Path, target: Path, layers: list[int] | None = None) -> None:
        stored = load_file(folder / "model.safetensors")
        self.w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
        self.config = json.loads((folder / "config.json").read_text())
        self.target: Any = load_reference(target)
        self.layers = layers or LAYERS
        embedding = self.target.model.embed_tokens.weight.detach()
        self.embedding: Tensor = self.w.get("embed_tokens.weight", embedding)
        self.outputs: list[Any] = []
        self.target.model.layers[-1].register_forward_hook(lambda *call: self.outputs.append(call[2]))

    def draft(self, text: list[int], count: int, banned_from: int = 256) -> list[int]:
        """``count`` tokens after the text, the likeliest each."""
        return self.draft_with_states(text, count, banned_from)[0]

    @torch.no_grad()
    def draft_with_states(self, text: list[int], count: int, banned_from: int = 256) -> tuple[list[int], Tensor]:
        """Tokens and the normalised states [count, H] that each was drawn from."""
        states = F.linear(self.normed_states(self.states(text)[:-1]), self.w["fc.weight"])  # [n - 1, H]
        tokens = list(text[1:])
        drafted: list[int] = []
        drawn_from: list[Tensor] = []
        for _ in range(count):
            hidden = self.layer(self.embedding[torch.tensor(tokens)], states)
            drawn_from.append(self.norm(hidden[-1:], "norm"))
            logits = F.linear(drawn_from[-1], self.w["lm_head.weight"])[0]
            full = torch.full((272,), float("-inf"))
            ids = torch.arange(len(logits)) + self.w.get("d2t", torch.zeros(len(logits), dtype=torch.long))
            full[ids] = logits
            drafted.append(int(full[:banned_from].argmax()))
            tokens.append(drafted[-1])
            states = torch.cat([states, drawn_from[-1] if self.config.get("norm_output") else hidden[-1:]])
        return drafted, torch.cat(drawn_from)

    def states(self, text: list[int]) -> Tensor:
        """[n, 3 H]: before the target's last norm."""
        self.outputs.clear()
        found = list(self.target(torch.tensor([text]), output_hidden_states=True).hidden_states)
        last = self.outputs[0]
        found[-1] = last[0] if isinstance(last, tuple) else last
        return torch.cat([found[layer].reshape(len(text), -1) for layer in self.layers], dim=-1)

    def normed_states(self, states: Tensor) -> Tensor:  # [n, 3 H]
        """States as ``fc`` reads them."""
        if "input_norm.weight" in self.w:
            states = F.rms_norm(states, (3 * HIDDEN,), self.w["input_norm.weight"], EPS)
        if "fc_norm.0.weight" in self.w:
            parts = torch.split(states, HIDDEN, dim=-1)
            states = torch.cat([self.norm(part, f"fc_norm.{place}") for place, part in enumerate(parts)], dim=-1)
        return states

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self.w[f"{name}.weight"], EPS)

    def layer(self, embeds: Tensor, states: Tensor) -> Tensor:  # [n, H] each
        normed = self.norm(states, "layers.0.hidden_norm")
        residual = normed if self.config["norm_before_residual"] else states
        x = torch.cat([self.norm(embeds, "layers.0.input_layernorm"), normed], dim=-1)
        hidden = residual + self.attention(x)
        x = self.norm(hidden, "layers.0.post_attention_layernorm")
        gated = F.silu(self.product(x, "mlp.gate_proj")) * self.product(x, "mlp.up_proj")
        return hidden + self.product(gated, "mlp.down_proj")

    def attention(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        q, k, v = (
            self.product(x, f"self_attn.{name}_proj").view(count, -1, HEAD_DIM).transpose(0, 1) for name in "qkv"
        )
        q, k = self.turned(q), self.turned(k)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (k, v))
        scores = (q @ k.transpose(1, 2)) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        return self.product(attended, "self_attn.o_proj")

    def turned(self, x: Tensor) -> Tensor:  # [heads, n, D]
        half = HEAD_DIM // 2
        angles = torch.arange(x.shape[1])[:, None] / THETA ** (torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"layers.0.{name}.weight"])
