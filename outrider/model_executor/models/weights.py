"""Tensors of a checkpoint in the Hugging Face layout: their names and shapes, and where in a ``Decoder`` they go."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from outrider.kv_cache import KVCacheLayout
from outrider.model_executor.distributed.communicator import SINGLE_RANK, SingleRank
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.layers.contract import WeightTarget
from outrider.model_executor.layers.mxfp4 import MXFP4_NUMBERS
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.decoder import Decoder
from outrider.model_executor.models.families import family_of
from outrider.model_executor.models.tensor_names import is_of_other_part

EMBEDDING_NAME = "model.embed_tokens.weight"
LAYER_EMBEDDING_NAME = "model.embed_tokens_per_layer.weight"
_KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d{1,5})\.self_attn\.[kv]_(?:proj|norm)\.")
_NO_MEMORY = torch.device("meta")
KV_SCALES = (".k_scale", ".v_scale", ".q_scale")
"""Names of the scales of a quantized KV cache; ``loader.kv_scales`` reads those that it needs."""


def weight_targets(decoder: Decoder) -> dict[str, WeightTarget]:
    """Every tensor that a checkpoint of this model must have, and what this rank takes of it."""
    return dict(decoder.weights())


def checkpoint_targets(config: ModelConfig) -> dict[str, WeightTarget]:
    """The same of a whole model, before any memory is taken for it."""
    return weight_targets(Decoder(config, dtype=config.dtype, device=_NO_MEMORY))


def weight_bytes(config: ModelConfig, dtype: torch.dtype, *, is_widened: bool, shard: Shard = SINGLE_RANK.shard) -> int:
    """Bytes of a rank's parameters; ``is_widened``: those of FP8 and FP4 are kept in ``dtype``."""
    least = dtype.itemsize if is_widened else 1
    return sum(
        tensor.numel() * max(least, tensor.itemsize) * (2 if is_widened and name.endswith(MXFP4_NUMBERS) else 1)
        for name, tensor in _parameters(config, dtype, shard)
    )


def decoding_bytes(config: ModelConfig, dtype: torch.dtype, shard: Shard = SINGLE_RANK.shard) -> int:
    """Bytes of a rank's parameters that a forward of one token reads: of experts those that it chooses."""
    experts, num_bytes = config.experts, 0.0
    for name, tensor in _parameters(config, dtype, shard):
        if name != LAYER_EMBEDDING_NAME and (name != EMBEDDING_NAME or config.tied_embeddings):
            share = experts.num_chosen / experts.count if experts is not None and ".experts." in name else 1.0
            num_bytes += share * tensor.nbytes
    return round(num_bytes)


def _parameters(config: ModelConfig, dtype: torch.dtype, shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter that a rank would hold, without memory."""
    place = _RankOnPaper(shard)
    for name, target in Decoder(config, dtype=dtype, device=_NO_MEMORY, communicator=place).weights():
        if target.destination is not None:
            yield name, target.destination


class _RankOnPaper(SingleRank):
    """Communicator of a rank that computes nothing."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard


def cache_layout(config: ModelConfig, dtype: torch.dtype, shard: Shard) -> KVCacheLayout:
    """Cache layout of a rank."""
    return Decoder(config, dtype=dtype, device=_NO_MEMORY, communicator=_RankOnPaper(shard)).kv_cache_layout


def is_ignored(name: str, config: ModelConfig) -> bool:
    """True if a checkpoint may have this tensor though nothing is done with it."""
    family = family_of(config.architecture)
    if is_of_other_part(name, family):
        return True
    if name.endswith(KV_SCALES):
        return True
    if (keys := _KEYS_AND_VALUES.match(name)) is not None and (layer := int(keys[1])) < config.num_layers:
        return config.kv_source(layer) != layer
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)
