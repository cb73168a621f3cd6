"""A synthetic MTP layer inside its target: what it costs is a real one's, after how many tokens it is right is chosen.

The target's head gives the token after t where the stream is the embedding e(t), so ``input_proj`` hands on the
embedding of the pair's token, to which everything else adds next to nothing. It also adds c <f, e(t)> (e(v) - e(w)) for
a random direction f and two tokens v and w: where c <f, e(t)> passes 1 the token after v has the highest logit, below
-1 the one after w. c is chosen so that it lies between for the share of tokens that was asked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from outrider.model_executor.synthetic.cycle import PairMap, TokenIds
from outrider.model_executor.synthetic.recipe import Recipe
from outrider.model_executor.synthetic.weights import BRANCH_RMS
from synthetic_pair.matrices import RandomMatrices
from synthetic_pair.shapes import Shape

_FILE = "mtp.safetensors"
_LAYER = "model.mtp_layers.0."
_LARGEST = 100.0
"""Bound on c, above which nearly all of the stream would be those two tokens."""


def write_mtp(folder: Path, target: Shape, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> PairMap:
    """Add an MTP layer to the folder of ``target``, with embedding and head where its weights are not there; returns
    what target and layer draw after each token.
    """
    weights = dict(_ends(recipe, target, dtype, device))
    embedding = weights["model.embed_tokens.weight"]
    pair = recipe.map_of(target.vocab_size)
    random = RandomMatrices("mtp", recipe.seed, dtype, device)
    joined, wrong = _input_proj(random, target, embedding, pair.order, recipe.acceptance)
    found = {f"{_LAYER}{name}": tensor for name, tensor in _layer(random, target, joined).items()}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] |= dict.fromkeys(found, _FILE)
        content["metadata"]["total_size"] += sum(tensor.nbytes for tensor in found.values())
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        name = _FILE
    else:
        found |= weights
        name = "model.safetensors"
    save_file({key: tensor.cpu().contiguous() for key, tensor in found.items()}, folder / name)
    drafted = np.where(wrong == 0, pair.target_next, np.where(wrong > 0, *pair.target_next[pair.order[:2]]))
    return PairMap(pair.order, pair.target_next, drafted, np.zeros_like(pair.foreseen))


def _ends(recipe: Recipe, target: Shape, dtype: torch.dtype, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Embedding and head of the target."""
    tensors = recipe.maker(target, dtype, device).tensors()
    return [(name, tensor) for name, tensor in tensors if name in ("model.embed_tokens.weight", "lm_head.weight")]


def _input_proj(
    random: RandomMatrices, target: Shape, embedding: torch.Tensor, order: TokenIds, acceptance: float
) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """[H, 2 H], the state's columns first; [V] by token whether the layer is right (0), or leads to v (1) or w (-1)."""
    hidden = target.hidden_size
    normed = torch.nn.functional.rms_norm(embedding.float(), (hidden,))
    direction = random.unit_vectors("direction", 1, hidden)[0]
    ends = normed[torch.from_numpy(order[:2].copy()).to(normed.device)]  # e(v), e(w)
    along, alike = normed @ direction, normed @ ends.T / hidden  # [V], [V, 2]
    lengths = embedding.float().square().mean(1).sqrt()  # [V], of which the head's rows are multiples
    # Of a token t with <f, e(t)> above 0 the rival is what follows v, else what follows w; products of two embeddings
    # are small beside 1, and counted.
    rival = (along < 0).long()
    own, other = (alike.gather(1, which[:, None])[:, 0] for which in (rival, 1 - rival))
    pushed = torch.from_numpy(order[:2].copy()).to(normed.device)[rival]  # [V]: v or w, whose successor is the rival
    rivals = lengths[pushed]
    gain = rivals * (1 - ends[0] @ ends[1] / hidden) - lengths * (own - other)
    bounds = (lengths - rivals * own) / (along.abs() * gain)  # [V] of c
    # v and w cannot be wrong in favor of themselves: 0 / 0 here, or what a processor's rounding makes of it.
    bounds[pushed == torch.arange(len(pushed), device=pushed.device)] = torch.inf
    scale = float(np.quantile(bounds.cpu().numpy(), 1 - acceptance)) if acceptance < 1 else 0.0
    scale = min(scale, _LARGEST)
    moved = torch.eye(hidden, device=direction.device) + scale * torch.outer(ends[0] - ends[1], direction)
    state = random("state", hidden, hidden, BRANCH_RMS / 8)
    wrong = torch.where(bounds < scale, along.sign(), 0.0)
    return torch.cat([state, moved.to(state.dtype)], dim=1), wrong.cpu().numpy()


def _layer(random: RandomMatrices, target: Shape, input_proj: torch.Tensor) -> dict[str, torch.Tensor]:
    keys = target.num_kv_heads * target.head_dim
    found = {"input_proj.weight": input_proj, **random.attention(target), **random.feed_forward(target)}
    for name, size in (("q", target.num_heads * target.head_dim), ("k", keys), ("v", keys)):
        found[f"self_attn.{name}_proj.bias"] = random(f"{name}_bias", 1, size)[0].clone()
    names = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    return found | {f"{name}.weight": random.ones(target.hidden_size) for name in names}
