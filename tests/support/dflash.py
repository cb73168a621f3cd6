"""DFlash read from its paper in plain PyTorch, float32, and random drafters in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.pair_heads import EPS, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, MATRICES, THETA
from tests.support.tiny_models import load_reference

LAYERS, MASK = 2, 260
TARGET_LAYER_IDS = [0, 1]
NORMS = {
    "self_attn.q_norm": HEAD_DIM,
    "self_attn.k_norm": HEAD_DIM,
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
}
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": 272,
    "tie_word_embeddings": False,
    "block_size": 5,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TARGET_LAYER_IDS},
}


def build_dflash(
    folder: Path, *, reverse: bool = False, speculators: bool = False, draft_vocab_size: int = 272, **changes: Any
) -> Path:
    """Write a random drafter; ``reverse`` turns its last norm round, ``speculators`` writes the other layout."""
    generator = torch.Generator().manual_seed(11)

    def noise(*shape: int) -> Tensor:
        return 0.25 * torch.randn(*shape, generator=generator) + float(len(shape) == 1)

    tensors = {
        "fc.weight": noise(HIDDEN, len(TARGET_LAYER_IDS) * HIDDEN),
        "hidden_norm.weight": noise(HIDDEN),
        "norm.weight": noise(HIDDEN) * (-1 if reverse else 1),
    }
    for layer in range(LAYERS):
        tensors |= {f"layers.{layer}.{name}.weight": noise(*shape) for name, shape in MATRICES.items()}
        tensors |= {f"layers.{layer}.{name}.weight": noise(size) for name, size in NORMS.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG
    if speculators:
        tensors |= {"embed_tokens.weight": noise(272, HIDDEN), "lm_head.weight": noise(draft_vocab_size, HIDDEN)}
        own = ("architectures", "block_size", "num_target_layers", "dflash_config")
        config = {
            "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 5,
            "draft_vocab_size": draft_vocab_size, "mask_token_id": MASK, "sample_from_anchor": False,
            "aux_hidden_state_layer_ids": [one + 1 for one in TARGET_LAYER_IDS],
            "transformer_layer_config": {key: value for key, value in CONFIG.items() if key not in own},
        }  # fmt: skip
    if draft_vocab_size != 272:
        chosen = torch.randperm(256, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(272, dtype=torch.bool).index_fill_(0, chosen, value=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


class DFlashReference:
    """A drafter and its target, a model of transformers. Every block is computed from the whole text anew."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.w = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        own = config.get("dflash_config", {})
        types = config.get("layer_types") or ["sliding_attention" if own.get("use_swa") else "full_attention"] * LAYERS
        window = own.get("swa_window_size") or config.get("sliding_window")
        self.windows = [window if one == "sliding_attention" else None for one in types]
        self.target: Any = load_reference(target)
        self.embedding: Tensor = self.w.get("embed_tokens.weight", self.target.model.embed_tokens.weight.detach())
        self.head: Tensor = self.w.get("lm_head.weight", self.target.lm_head.weight.detach())

    def draft(self, text: list[int], count: int) -> list[int]:
        """``count`` tokens after the text, the likeliest each."""
        logits = F.linear(self.block(text, count), self.head)
        if "d2t" in self.w:
            ids = self.w["d2t"] + torch.arange(len(self.w["d2t"]))
            return [int(ids[row.argmax()]) for row in logits]
        return [int(row[:257].argmax()) for row in logits]

    @torch.no_grad()
    def block(self, text: list[int], count: int) -> Tensor:
        """The states [count, H] of the masks after the text."""
        found = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        context = torch.cat([found[layer + 1][0][:-1] for layer in TARGET_LAYER_IDS], dim=-1)
        return self.block_over(context, text[-1], count)

    def block_over(self, context: Tensor, last_token_id: int, count: int) -> Tensor:
        """The same after a text that ends so; ``context`` [n, F] are the target's states before that token."""
        context = self.norm(F.linear(context, self.w["fc.weight"]), "hidden_norm")
        x = self.embedding[torch.tensor([last_token_id, *[MASK] * count])]
        for layer in range(LAYERS):
            prefix = f"layers.{layer}."
            x = x + self.attention(self.norm(x, f"{prefix}input_layernorm"), context, layer)
            normed = self.norm(x, f"{prefix}post_attention_layernorm")
            gated = F.silu(self.linear(normed, f"{prefix}mlp.gate_proj")) * self.linear(normed, f"{prefix}mlp.up_proj")
            x = x + self.linear(gated, f"{prefix}mlp.down_proj")
        return self.norm(x, "norm")[1:]

    def attention(self, x: Tensor, context: Tensor, layer: int) -> Tensor:
        """Queries are the block's; keys and values the context's and the block's, the last ones where there is a
        window.
        """
        prefix, window = f"layers.{layer}.", self.windows[layer]
        start, both = context.shape[0], torch.cat([context, x])
        q, k, v = (
            self.linear(rows, f"{prefix}self_attn.{name}_proj").view(rows.shape[0], -1, HEAD_DIM)
            for name, rows in (("q", x), ("k", both), ("v", both))
        )
        q = turned(self.norm(q, f"{prefix}self_attn.q_norm"), start)
        k = turned(self.norm(k, f"{prefix}self_attn.k_norm"), 0)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        if window is not None:
            scores[..., : max(0, len(both) - window)] = float("-inf")
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.linear(attended.reshape(x.shape[0], -1), f"{prefix}self_attn.o_proj")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], EPS)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"])


def turned(x: Tensor, start: int) -> Tensor:  # [n, heads, D] at positions from start on
    half = HEAD_DIM // 2
    angles = (start + torch.arange(x.shape[0]))[:, None, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
