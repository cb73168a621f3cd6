"""Pair with flat logits: random weights of a Llama shape whose two likeliest tokens are often close.

The draft is the target's first layers, with the same embedding and head, so that it agrees with the target at many
positions and not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SHARPNESS = 3.0
"""Deviation of attention scores, so that outputs depend on few keys of the text."""
_OUTER = "outer.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class FlatShape:
    """Sizes of a pair; those of Llama 3 8B with few layers."""

    num_layers: int = 12
    draft_layers: int = 3
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 128256
    max_length: int = 16384
    layer_share: float = 0.15
    """Share of a layer's output against the embedding: of small ones few layers say much about all."""

    def config(self, num_layers: int) -> dict[str, Any]:
        """The config.json of a model of so many layers."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab_size,
            "num_hidden_layers": num_layers, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.max_length, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        }  # fmt: skip

    def layer(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """(name, shape, deviation) of each matrix of a layer."""
        hidden, inner, heads = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        yield "self_attn.q_proj", (heads, hidden), _SHARPNESS * hidden**-0.5
        yield "self_attn.k_proj", (keys, hidden), hidden**-0.5
        yield "self_attn.v_proj", (keys, hidden), hidden**-0.5
        yield "self_attn.o_proj", (hidden, heads), self.layer_share * heads**-0.5
        yield "mlp.gate_proj", (inner, hidden), hidden**-0.5
        yield "mlp.up_proj", (inner, hidden), hidden**-0.5
        yield "mlp.down_proj", (hidden, inner), self.layer_share * inner**-0.5


def write_pair(folder: Path, shape: FlatShape, device: str) -> tuple[Path, Path]:
    """Write both models in bfloat16; returns the folders of target and draft, which share their files."""
    target, draft = folder / "target", folder / "draft"
    target.mkdir(parents=True)
    draft.mkdir()
    generator = torch.Generator(device).manual_seed(0)

    def random(size: tuple[int, ...], deviation: float) -> torch.Tensor:
        made = torch.empty(size, dtype=torch.bfloat16, device=device)
        return made.normal_(0, deviation, generator=generator).cpu()

    ones = torch.ones(shape.hidden_size, dtype=torch.bfloat16)
    outer, vocabulary = {"model.norm.weight": ones}, (shape.vocab_size, shape.hidden_size)
    outer["model.embed_tokens.weight"] = random(vocabulary, 1.0)
    outer["lm_head.weight"] = random(vocabulary, shape.hidden_size**-0.5)
    save_file(outer, target / _OUTER, metadata={"format": "pt"})
    names, own = dict.fromkeys(outer, _OUTER), dict.fromkeys(outer, _OUTER)
    for number in range(shape.num_layers):
        prefix, file = f"model.layers.{number}.", f"layer-{number:03d}.safetensors"
        made = {f"{prefix}{name}.weight": random(size, deviation) for name, size, deviation in shape.layer()}
        made |= {f"{prefix}{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        save_file(made, target / file, metadata={"format": "pt"})
        names |= dict.fromkeys(made, file)
        own |= dict.fromkeys(made, file) if number < shape.draft_layers else {}
    for file in set(own.values()):
        os.link(target / file, draft / file)
    _describe(target, shape.config(shape.num_layers), names)
    _describe(draft, shape.config(shape.draft_layers), own)
    return target, draft


def _describe(folder: Path, config: dict[str, Any], names: dict[str, str]) -> None:
    folder.joinpath("config.json").write_text(json.dumps(config))
    folder.joinpath(_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġt{index}" for index in range(len(alphabet), config["vocab_size"]))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
