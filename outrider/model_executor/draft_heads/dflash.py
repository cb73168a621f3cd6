"""DFlash: drafts a block of tokens in one forward, by block diffusion over states of several of the target's layers.

Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026 (arXiv 2602.06036), and
github.com/z-lab/dflash, ``dflash/model.py``. The target's states, joined by ``fc`` and normalised, are keys and values
of every layer at their own positions. The block's queries are the newest token and a mask for each token to be drafted;
they see all of the context and each other. At each mask the target's head gives its token's logits, independent of what
is drawn at the others.

Checkpoints are z-lab's (``DFlashDraftModel``): ``fc``, ``hidden_norm``, ``norm`` and ``layers.N.`` as in Qwen3;
embedding and head are the target's. Position i of the KV cache is the state of position i.

Shape letters: ``T`` tokens, ``N`` rows, ``H`` hidden size, ``F`` values that are read of a position, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ModelError
from outrider.kv_cache import KVCacheLayout
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.draft_heads.config import check_architecture, for_target, read_number
from outrider.model_executor.draft_heads.pair_head import PlainInput
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.context import LayerContext
from outrider.model_executor.layers.contract import DeviceBatch, Residual, Weights, whole
from outrider.model_executor.layers.embedding import VocabRows
from outrider.model_executor.layers.linear import Features, Linear
from outrider.model_executor.layers.linear_methods import LINEAR_METHODS
from outrider.model_executor.layers.norm import RmsNorm
from outrider.model_executor.layers.rope import RotaryEmbedding
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.config_reader import config_of_fields, read_model_config
from outrider.model_executor.models.decoder import DecoderLayer
from outrider.model_executor.models.json_files import read_object
from outrider.types import LAST_HIDDEN_STATE


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """One block drafter and what it reads."""

    layer: ModelConfig
    """Its decoder; ``vocab_size`` and ``max_position`` are the target's."""
    hidden_state_layers: tuple[int, ...]
    block_size: int
    """Queries of a block at most, the newest token among them."""
    mask_token_id: int

    @property
    def target_hidden_size(self) -> int:
        """Of one layer's state."""
        return self.layer.hidden_size


def read_dflash_config(folder: Path, target_folder: Path) -> DFlashConfig:
    """What a DFlash folder and its target's say; ``ModelError`` for what is no such drafter, or another target's."""
    path = folder / "config.json"
    raw, target = read_object(path), read_model_config(target_folder)
    check_architecture(path, raw, ("DFlashDraftModel",), "DFlash drafter")
    own = raw.get("dflash_config")
    if not isinstance(own, dict):
        raise ModelError(f"{path}: dflash_config is missing; a DFlash drafter has mask_token_id in it")
    layer = for_target(path, config_of_fields(path, {**raw, "model_type": "qwen3"}, "Qwen3ForCausalLM"), target)
    if layer.sliding_window is not None or own.get("use_swa") or own.get("causal"):
        raise ModelError(f"{path}: a DFlash drafter with full attention in both directions is supported, and no other")
    if layer.hidden_size != target.hidden_size:
        raise ModelError(
            f"{path}: hidden_size is {layer.hidden_size}, and a DFlash drafter for {target_folder} has the target's,"
            f" {target.hidden_size}"
        )
    block_size = read_number(path, {**own, **raw}, "block_size", 0)
    mask_token_id = read_number(path, own, "mask_token_id", 0)
    if block_size < 2 or not 0 < mask_token_id < layer.vocab_size:
        raise ModelError(
            f"{path}: block_size should be above 1 and dflash_config.mask_token_id an id below {layer.vocab_size}; they"
            f" are {block_size} and {mask_token_id}"
        )
    return DFlashConfig(layer, _layers(path, own, layer, target), block_size, mask_token_id)


def _layers(path: Path, own: dict[str, Any], layer: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """Those that the file names, else as many as the drafter has layers, evenly from the second to the third last.

    z-lab numbers layers from 0 and means what comes out of them; what comes out of the last is normalised.
    """
    count = target.num_layers
    found = own.get("target_layer_ids")
    if found is None:
        found = _evenly(count, layer.num_layers)
    if not isinstance(found, list) or not found or not all(type(one) is int and 0 <= one < count for one in found):
        raise ModelError(f"{path}: dflash_config.target_layer_ids should be layers from 0 to {count - 1}, not {found}")
    return tuple(LAST_HIDDEN_STATE if one == count - 1 else one + 1 for one in found)


def _evenly(num_target_layers: int, num_layers: int) -> list[int]:
    if num_layers == 1:
        return [num_target_layers // 2]
    start, end = 1, num_target_layers - 3
    return [round(start + i * (end - start) / (num_layers - 1)) for i in range(num_layers)]


class DFlashHead:
    """A block drafter, its parameters uninitialised until they are loaded; a ``DraftHead`` whose pairs only store."""

    kind = "a DFlash drafter"
    borrowed = ("embed_tokens.weight", "lm_head.weight")

    def __init__(self, config: DFlashConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        layer = config.layer
        context = LayerContext(layer, layer, dtype, device, SINGLE_RANK, LINEAR_METHODS[None])
        size = layer.hidden_size
        self._embedding = VocabRows(context)
        self._fc = Linear(context, Features.all(len(config.hidden_state_layers) * size), (Features.all(size, "fc"),))
        self._state_norm, self._norm = (RmsNorm(size, layer.rms_norm_eps, dtype=dtype, device=device) for _ in range(2))
        self._layers = [DecoderLayer(context, number) for number in range(layer.num_layers)]
        self._head = Linear(context, Features.all(size), (Features.all(layer.vocab_size, "lm_head"),))
        self._rotary = RotaryEmbedding(
            layer.rope, head_dim=layer.head_dim, max_position=layer.max_position, device=device
        )
        self.kv_cache_layout = KVCacheLayout.of([one.attention.kv_cache_spec for one in self._layers])

    def canonical(self, name: str) -> str | None:
        """As ``dflash/model.py`` saves them."""
        return name.removeprefix("model.")

    def weights(self) -> Weights:
        """All tensors, ``embed_tokens.weight`` and ``lm_head.weight`` included."""
        yield from self._embedding.weights()
        yield from self._head.weights()
        yield from self._fc.weights()
        yield "hidden_norm.weight", whole(self._state_norm.weight)
        yield "norm.weight", whole(self._norm.weight)
        for number, layer in enumerate(self._layers):
            yield from ((f"layers.{number}.{name}", target) for name, target in layer.weights())

    def finish_loading(self) -> None:
        """All tensors are there."""
        self._head.prepare()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [T, F] to what every layer makes keys and values of [T, H]."""
        return self._state_norm(self._fc(states))

    def __call__(
        self, batch: DeviceBatch, states: torch.Tensor, kv_cache: KVCacheTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values of ``states`` [T, H] in all layers; returns the states, of which nothing is drawn."""
        angles = self._rotary.angles(batch.positions, self.dtype)
        for number, layer in enumerate(self._layers):
            source = PlainInput(states, None, self._norm, SINGLE_RANK)
            layer.attention.store(source, kv_cache.layer(number), angles, batch.groups[0])
        return states, states

    def block(self, batch: DeviceBatch, kv_cache: KVCacheTensors) -> torch.Tensor:
        """Run the queries of blocks, each a row of the batch whose context is its whole block: what ``logits`` takes,
        [T, H].
        """
        hidden = self._embedding.look_up(batch.token_ids)
        angles = self._rotary.angles(batch.positions, self.dtype)
        delta: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            hidden, delta = layer(hidden, delta, kv_cache.layer(number), angles, batch.groups[0])
        return Residual(hidden, delta, self._norm, SINGLE_RANK).normed()[1]

    def queries(self, last_token_id: int, num_drafts: int) -> Sequence[int]:
        """Token ids of a block that drafts so many tokens."""
        return [last_token_id, *[self.config.mask_token_id] * num_drafts]

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[N, H] to logits [N, V] float32."""
        return self._head(normed)[:, : self.config.layer.vocab_size].float()
