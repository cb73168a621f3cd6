"""Heads that a checkpoint stores though its configuration ties them to the embedding.

Published configurations of models with images do not always say that the two differ, so that the files decide, as they
do in transformers.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import ModelError
from outrider.model_executor.loader.checkpoint import HEAD_NAME, StoredTensor
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.weights import EMBEDDING_NAME

_log = logging.getLogger(__name__)
_ROWS = 8192
"""Compared at once."""


def with_stored_head(folder: Path, config: ModelConfig, tensors: dict[str, StoredTensor]) -> ModelConfig:
    """The configuration, untied if the files have a head that differs from the embedding."""
    if not config.tied_embeddings:
        return config
    embedding, head = tensors.get(EMBEDDING_NAME), tensors.get(HEAD_NAME)
    if embedding is None or head is None or _are_equal(embedding, head):
        return config
    _log.warning("%s: tie_word_embeddings is true, and the head on file is another than the embedding: used", folder)
    return replace(config, tied_embeddings=False)


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    try:
        with safe_open(first.file, framework="pt") as one, safe_open(second.file, framework="pt") as other:
            sides: tuple[Any, Any] = one.get_slice(first.key), other.get_slice(second.key)
            return all(
                torch.equal(*(side[start : start + _ROWS] for side in sides))
                for start in range(0, first.shape[0], _ROWS)
            )
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{first.file} cannot be read: {error}") from error
