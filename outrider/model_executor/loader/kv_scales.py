"""Scales of keys and values for a cache of FP8 numbers, as checkpoints have them.

vLLM's, compressed-tensors' and ModelOpt's names; layers without any have scales of 1.
"""

from __future__ import annotations

import math

from safetensors import SafetensorError, safe_open

from outrider.errors import ModelError
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.loader.checkpoint import StoredTensor
from outrider.model_executor.models.decoder import Decoder

_NAMES = {"k": ("k_scale", "k_proj.k_scale"), "v": ("v_scale", "v_proj.v_scale")}


def read_kv_scales(decoder: Decoder, stored: dict[str, StoredTensor]) -> None:
    """Set each layer's scales; ``ModelError`` for one that is no positive number."""
    for number, layer in enumerate(decoder.layers):
        if not isinstance(layer.attention, Attention):  # of recurrent states
            continue
        prefix = f"model.layers.{decoder.config.kv_source(number)}.self_attn."
        key, value = (_scale(stored, [prefix + name for name in _NAMES[side]]) for side in "kv")
        layer.attention.set_kv_scales(key, value)


def _scale(stored: dict[str, StoredTensor], names: list[str]) -> float:
    tensor = next((stored[name] for name in names if name in stored), None)
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
