"""Tensors of a checkpoint in the Hugging Face layout: their names and shapes, and where in a ``Decoder`` they go."""

from __future__ import annotations

import torch

from outrider.model_executor.layers.contract import WeightTarget
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.decoder import Decoder
from outrider.model_executor.models.families import family_of

_NO_MEMORY = torch.device("meta")


def weight_targets(decoder: Decoder) -> dict[str, WeightTarget]:
    """Every tensor that a checkpoint of this model must have, and what this rank takes of it."""
    return dict(decoder.weights())


def checkpoint_targets(config: ModelConfig) -> dict[str, WeightTarget]:
    """The same of a whole model, before any memory is taken for it."""
    return weight_targets(Decoder(config, dtype=config.dtype, device=_NO_MEMORY))


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may have this tensor though nothing is done with it."""
    if name.startswith("model.mtp_layers."):
        return family_of(config.architecture).has_mtp
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)
