"""Scales of keys and values for a cache of FP8 numbers, as checkpoints have them.

vLLM's, compressed-tensors' and ModelOpt's names; layers without any have scales of 1.
"""

from __future__ import annotations

import math
import re

from safetensors import SafetensorError, safe_open

from outrider.errors import ModelError
from outrider.model_executor.loader.checkpoint import StoredTensor
from outrider.model_executor.models.decoder import Decoder

_NAME = re.compile(r".*\.(\d+)\.\w+\.(?:[kv]_proj\.)?([kv])_scale")


def read_kv_scales(decoder: Decoder, stored: dict[str, StoredTensor]) -> None:
    """Set each layer's scales; ``ModelError`` for one that is no positive number."""
    found = {(int(match[1]), match[2]): tensor for name, tensor in stored.items() if (match := _NAME.fullmatch(name))}
    for number, layer in decoder.scaled_layers.items():
        source = decoder.config.kv_source(number)
        layer.set_kv_scales(*(_scale(found.get((source, side))) for side in "kv"))


def _scale(tensor: StoredTensor | None) -> float:
    if tensor is None:
        return 1.0
    try:
        with safe_open(tensor.file, framework="pt") as handle:
            numbers = handle.get_tensor(tensor.key).float().flatten().tolist()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{tensor.file} cannot be read: {error}") from error
    if len(numbers) != 1 or not math.isfinite(numbers[0]) or numbers[0] <= 0:
        raise ModelError(f"{tensor.file}: {tensor.name} should be one positive number, and is {numbers[:4]}")
    return float(numbers[0])
