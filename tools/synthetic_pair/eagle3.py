"""A synthetic EAGLE-3 head: what it costs is a real one's, what it drafts after a token is chosen.

Every matrix is dense and random, and read. Attention sees its own pair alone: queries and keys come from one matrix, so
that a pair's product with itself is far larger than with any other. What it then adds is a random image of the token's
embedding, beside which state, feed-forward and all that came before are next to nothing; a row of the head is the image
of the token before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.model_executor.synthetic.recipe import Recipe, write_recipe
from outrider.model_executor.synthetic.weights import BRANCH_RMS, PEAK, rows_after
from synthetic_pair.matrices import RandomMatrices
from synthetic_pair.shapes import Shape

PUBLISHED_VOCAB = 32000
"""Vocabulary of the heads that SafeAILab has published for models of 128,256 tokens."""
_SELF_SCORE = 3.0
"""Root mean square of a query; others' scores stay below a third of a pair's own."""


def write_eagle3(
    folder: Path, target: Shape, recipes: Mapping[str, Recipe], dtype: torch.dtype, device: torch.device
) -> None:
    """Write config and weights of a head for ``target``, with the target's embedding. ``recipes`` are those of both
    roles; the head's vocabulary is their cycle.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = recipes["draft"]
    ids = torch.from_numpy(recipe.map_of(target.vocab_size).order[: recipe.cycle_size]).sort().values
    config = {
        **target.config(str(dtype).removeprefix("torch.")),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(ids),
        "norm_before_residual": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_recipe(folder, recipe)
    embedding = next(iter(recipes["target"].maker(target, dtype, device).tensors()))[1]
    tensors = _Maker(target, recipe, dtype, device).tensors(ids, embedding)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class _Maker:
    def __init__(self, target: Shape, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
        self._target, self._recipe, self._dtype, self._device = target, recipe, dtype, device
        self._random = RandomMatrices("eagle3", recipe.seed, dtype, device)

    def tensors(self, ids: torch.Tensor, embedding: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors by SafeAILab's names, on the CPU."""
        shape = self._target
        hidden, groups, random = shape.hidden_size, shape.num_heads // shape.num_kv_heads, self._random
        keys = shape.num_kv_heads * shape.head_dim
        key = random("k", keys, 2 * hidden, _SELF_SCORE)
        # Each head's queries are its keys; every head of a group asks alike.
        query = key.view(shape.num_kv_heads, 1, shape.head_dim, -1).expand(-1, groups, -1, -1).reshape(-1, 2 * hidden)
        value, output = random("v", keys, 2 * hidden), random("o", hidden, groups * keys)
        found = {
            "embed_tokens.weight": embedding,
            "fc.weight": random("fc", hidden, 3 * hidden, BRANCH_RMS / 8),
            "lm_head.weight": self._head(ids, embedding, value[:, :hidden], output),
            "midlayer.self_attn.q_proj.weight": query.clone(),
            "midlayer.self_attn.k_proj.weight": key,
            "midlayer.self_attn.v_proj.weight": value,
            "midlayer.self_attn.o_proj.weight": output,
        }
        found |= {f"midlayer.{name}": one for name, one in random.feed_forward(shape).items()}
        for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
            found[f"{name}.weight"] = random.ones(hidden)
        # The stream of a later step begins with the image of the token before, of which little may be left.
        found["midlayer.hidden_norm.weight"] *= BRANCH_RMS
        if len(ids) < shape.vocab_size:
            found["d2t"] = ids - torch.arange(len(ids))
            found["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
        return {name: tensor.cpu().contiguous() for name, tensor in found.items()}

    def _head(
        self, ids: torch.Tensor, embedding: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """[U, H] row n is the normalised image of the tokens that the draft lets n follow."""
        groups = self._target.num_heads // self._target.num_kv_heads
        normed = torch.nn.functional.rms_norm(embedding.float(), embedding.shape[1:])
        values = (normed @ value.float().T).view(-1, self._target.num_kv_heads, 1, self._target.head_dim)
        image = values.expand(-1, -1, groups, -1).flatten(1) @ output.float().T
        image = torch.nn.functional.rms_norm(image, image.shape[1:])
        following = torch.from_numpy(self._recipe.successors(self._target.vocab_size).first)
        rows = rows_after(image, following)[ids.to(self._device)]
        return (rows * (PEAK / self._target.hidden_size)).to(self._dtype)
