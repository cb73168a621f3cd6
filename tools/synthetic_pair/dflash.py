"""A synthetic DFlash drafter: what it costs is a real one's, each token that it drafts is right as often as was asked.

All masks of a block are one token, so a mask has to learn from attention how far behind the anchor it lies. In the
first layer every head looks for one distance: keys of the anchor turn in the fastest rotary pairs, in which a query
matches at that distance alone, and keys of masks lie in the slowest, which match a little worse at any. So a head
gathers the anchor's value at one mask, and at every other the masks', which are zero. The image of the anchor's
embedding in the heads of distance k is what mask k ends with, beside which all else is next to nothing; a row of the
last product is the sum of the images, by distance, of the tokens after which the drafter says it. All matrices are
dense and read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.model_executor.synthetic.recipe import Recipe, write_recipe
from outrider.model_executor.synthetic.weights import BRANCH_RMS, PEAK
from synthetic_pair.matrices import RandomMatrices
from synthetic_pair.shapes import Shape

NUM_LAYERS, BLOCK_SIZE = 5, 8
"""Layers as in the drafters that z-lab has published."""
_SLOWEST_OF_FAST = 0.2
"""Radians a position, of the rotary pairs that tell distances apart."""
_MARGIN = 10.0
"""Margin between the scores of what a head looks for and of what it falls back to, and of that and any other distance.
"""
_NOISE = 0.05
"""Noise of queries and keys, in root mean square, beside those that are meant."""


def write_dflash(
    folder: Path, target: Shape, recipe: Recipe, dtype: torch.dtype, device: torch.device, *,
    num_layers: int = NUM_LAYERS, block_size: int | None = None,
) -> None:  # fmt: skip
    """Write config and weights of a drafter for ``target``, with embedding and last product of its own; its vocabulary
    is the recipe's cycle. ``ValueError`` for blocks longer than there are heads; if none is given, they are
    ``BLOCK_SIZE`` long, or as long as the heads allow.
    """
    block_size = min(BLOCK_SIZE, target.num_heads + 1) if block_size is None else block_size
    if not 2 <= block_size <= target.num_heads + 1:
        raise ValueError(f"block_size: must be from 2 to {target.num_heads + 1}, one more than the heads")
    folder.mkdir(parents=True, exist_ok=True)
    order = recipe.map_of(target.vocab_size).order
    size = recipe.cycle_size or target.vocab_size
    ids = torch.from_numpy(order[:size]).sort().values
    config: dict[str, Any] = {
        **target.config(str(dtype).removeprefix("torch.")),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "block_size": block_size,
        "draft_vocab_size": size,
        "dflash_config": {"mask_token_id": _mask_of(recipe, target), "target_layer_ids": _layers(target, num_layers)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_recipe(folder, recipe)
    random = RandomMatrices("dflash", recipe.seed, dtype, device)
    made = _Drafter(target, recipe, random, num_layers=num_layers, block_size=block_size)
    found = dict(made.tensors(ids))
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in found.items()}, folder / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip


def _mask_of(recipe: Recipe, target: Shape) -> int:
    """The token that stands for a mask: the last of the order, which a smaller cycle never walks; not token 0."""
    order = recipe.map_of(target.vocab_size).order
    return int(order[-1] or order[-2])


def _layers(target: Shape, count: int) -> list[int]:
    """Spread from the second to the third last, each once."""
    last = max(1, target.num_layers - 3)
    return sorted({min(target.num_layers - 1, round(1 + i * (last - 1) / max(1, count - 1))) for i in range(count)})


class _Drafter:
    def __init__(
        self, target: Shape, recipe: Recipe, random: RandomMatrices, *, num_layers: int, block_size: int
    ) -> None:
        self._target, self._recipe, self._dtype, self._device = target, recipe, random.dtype, random.device
        self._num_layers, self._num_drafts = num_layers, block_size - 1
        self._random, device = random, random.device
        self._common, self._mask = self._random.unit_vectors("common", 2, target.hidden_size)
        """[H] in which all tokens but the mask are alike, and the mask's own."""
        self._distances = 1 + torch.arange(target.num_heads, device=device) % self._num_drafts
        """[heads] that each head looks for."""

    def tensors(self, ids: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors by z-lab's names."""
        shape, random = self._target, self._random
        hidden = shape.hidden_size
        images = self._embedding()
        first = self._first_attention()
        yield "embed_tokens.weight", images.to(self._dtype)
        yield "lm_head.weight", self._head(ids, images, first)
        count = len(_layers(shape, self._num_layers))
        yield "fc.weight", self._without(random("fc", hidden, count * hidden).T.float()).T.to(self._dtype)
        for name in ("hidden_norm", "norm"):
            yield f"{name}.weight", random.ones(hidden)
        small = BRANCH_RMS / (2 * self._num_layers) ** 0.5
        for number in range(self._num_layers):
            prefix = f"layers.{number}."
            attention = random.attention(shape, prefix, small)
            yield from ({f"{prefix}{name}": one for name, one in first.items()} if number == 0 else attention).items()
            yield from random.feed_forward(shape, prefix, small).items()
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}{name}.weight", random.ones(hidden)
            gain = self._sharpness()[0] if number == 0 else 1.0
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}self_attn.{name}.weight", gain * random.ones(shape.head_dim)
        if len(ids) < shape.vocab_size:
            yield "d2t", ids - torch.arange(len(ids))
            yield "t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)

    def _embedding(self) -> torch.Tensor:
        """[V, H] float32, small beside what attention adds: half of a token is its own, half what all have."""
        size, hidden = self._target.vocab_size, self._target.hidden_size
        own = self._without(self._random("embedding", size, hidden).float()) * hidden**0.5
        found: torch.Tensor = BRANCH_RMS * (own + hidden**0.5 * self._common) / 2**0.5
        found[_mask_of(self._recipe, self._target)] = BRANCH_RMS * hidden**0.5 * self._mask
        return found.to(self._dtype).float()

    def _without(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [N, H] without what they have of the two directions."""
        both = torch.stack([self._common, self._mask])
        return rows - (rows @ both.T) @ both

    def _first_attention(self) -> dict[str, torch.Tensor]:
        shape, random = self._target, self._random
        size, hidden = shape.head_dim, shape.hidden_size
        keys, queries = shape.num_kv_heads * size, shape.num_heads * size
        fast, slow = self._pairs()
        _, fallback = self._sharpness()
        sought = torch.stack([fast(int(one)) + fallback * slow for one in self._distances]).flatten()
        of_anchor, of_mask = (one.repeat(shape.num_kv_heads) for one in (fast(0), slow))
        scale = (size / hidden) ** 0.5
        query = torch.outer(sought, self._mask) * scale
        # Half of an anchor is what all have: see ``_embedding``.
        key = (torch.outer(of_anchor, self._common) * 2**0.5 + torch.outer(of_mask, self._mask)) * scale
        value = self._without(random("first.v", keys, hidden, 2**0.5).float())
        per_distance = shape.num_heads / self._num_drafts
        made = {
            "q_proj": query + random("first.q", queries, hidden, _NOISE).float(),
            "k_proj": key + self._without(random("first.k", keys, hidden, _NOISE).float()),
            "v_proj": value,
            "o_proj": random("first.o", hidden, queries, (shape.num_heads / per_distance) ** 0.5),
        }
        return {f"self_attn.{name}.weight": one.to(self._dtype) for name, one in made.items()}

    def _angles(self) -> torch.Tensor:
        """[D / 2] radians a position of the rotary pairs; what stretches a rope leaves the fast ones as they are."""
        size = self._target.head_dim
        exponents = torch.arange(0, size, 2, device=self._device).float() / size
        return torch.pow(self._target.rope_theta, -exponents)

    def _pairs(self) -> tuple[Callable[[int], torch.Tensor], torch.Tensor]:
        """Function that gives unit vectors [D] of the fast pairs, which match where they are so far ahead of a key
        ahead of 0; and one of the slow pairs.
        """
        angles = self._angles()
        fast, slow = angles >= _SLOWEST_OF_FAST, torch.arange(len(angles), device=self._device) >= 3 * len(angles) // 4

        def turned(distance: int) -> torch.Tensor:
            turn = angles * distance
            found: torch.Tensor = torch.cat([turn.cos() * fast, -turn.sin() * fast]) / float(fast.sum()) ** 0.5
            return found

        return turned, torch.cat([slow.float(), torch.zeros_like(angles)]) / float(slow.sum()) ** 0.5

    def _sharpness(self) -> tuple[float, float]:
        """Weight of the norms of queries and keys, and a query's part in the slow pairs over that in the fast ones."""
        angles = self._angles()
        fast = angles[angles >= _SLOWEST_OF_FAST]
        nearest = max(float((fast * apart).cos().mean()) for apart in range(1, self._num_drafts + 1))
        fallback = (1 + nearest) / 2
        part = 1 / math.hypot(1, fallback)
        return (_MARGIN / (part * (1 - fallback) * self._target.head_dim**0.5)) ** 0.5, fallback

    def _head(self, ids: torch.Tensor, embedding: torch.Tensor, first: dict[str, torch.Tensor]) -> torch.Tensor:
        """[U, H] by the draft's own ids."""
        shape = self._target
        groups = shape.num_heads // shape.num_kv_heads
        normed = torch.nn.functional.rms_norm(embedding, embedding.shape[1:])
        values = normed @ first["self_attn.v_proj.weight"].float().T
        values = values.view(-1, shape.num_kv_heads, 1, shape.head_dim).expand(-1, -1, groups, -1).flatten(1, 2)
        output = first["self_attn.o_proj.weight"].float().view(-1, shape.num_heads, shape.head_dim)
        pair = self._recipe.map_of(shape.vocab_size)
        target_next, draft_next = (torch.from_numpy(one) for one in (pair.target_next, pair.draft_next))
        anchors = torch.from_numpy(pair.order[: len(ids)])
        before, rows = anchors, torch.zeros(shape.vocab_size, shape.hidden_size, device=self._device)
        for distance in range(1, self._num_drafts + 1):
            heads = self._distances == distance
            image = values[:, heads].flatten(1) @ output[:, heads].flatten(1).T
            image = torch.nn.functional.rms_norm(image, image.shape[1:])
            rows.index_add_(0, draft_next[before].to(self._device), image[anchors.to(self._device)])
            before = target_next[before]
        return (rows[ids.to(self._device)] * (PEAK / shape.hidden_size)).to(self._dtype)
