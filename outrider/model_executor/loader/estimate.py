"""Estimate of a model from its configuration alone: how it would be loaded, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.kv_cache import KVCacheLayout
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.loader.checkpoint import has_weights
from outrider.model_executor.loader.fallback import read_sizes
from outrider.model_executor.loader.model import (
    KVCacheDtype,
    LoadFormat,
    ModelImplementation,
    QuantizationName,
    check_folder,
    choose_cache_dtype,
    choose_dtype,
    choose_length,
    is_text_part,
    window_request,
    with_parallel_experts,
)
from outrider.model_executor.loader.tokenizer_files import check_tokenizer, read_tokenizer
from outrider.model_executor.models import FALLBACK_SPEED, ModelConfig, read_model_config
from outrider.model_executor.models.weights import cache_layout, decoding_bytes, weight_bytes


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """Estimate of how a model would be loaded."""

    config: ModelConfig
    dtype: torch.dtype
    """Type of activations and all weights that are not quantized."""
    max_model_len: int
    weight_bytes: int
    """Bytes of weights of each rank on a GPU; of uneven parts those of the largest."""
    kv_bytes_per_token: int | None = None
    """Bytes of a token's keys and values on all ranks; None: known once the weights are."""
    longest_bytes: int = 0
    """Bytes on all ranks of the keys and values of a sequence of ``max_model_len``."""
    window: int | None = None
    """Tokens that some layers keep, where others keep all."""
    state_bytes: int = 0
    """Bytes on all ranks of one sequence's states in recurrent layers."""
    decoding_bytes: int | None = None
    """Bytes of weights of each rank that a forward of one token reads; None: not known."""

    @property
    def path(self) -> str:
        """Code that would compute the model."""
        if self.config.is_fallback:
            return f"through transformers: {self.config.architecture}, expect {FALLBACK_SPEED} of native speed"
        return f"native: {self.config.architecture}"

    @property
    def is_text_part(self) -> bool:
        """True if the checkpoint's model takes images or sound too."""
        return is_text_part(self.config)

    @property
    def weights(self) -> str:
        """Format of the weights."""
        name = str(self.dtype).removeprefix("torch.")
        return name if self.config.quantization is None else f"{name}, {self.config.quantization}"


def estimate_model(
    folder: Path,
    *,
    dtype: str = "auto",
    quantization: QuantizationName = "none",
    kv_cache_dtype: KVCacheDtype = "auto",
    model_impl: ModelImplementation = "auto",
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    enable_expert_parallel: bool = False,
    reads_headers: bool = True,
) -> ModelEstimate:
    """Estimate of a model folder whose weights need not be there. Headers of those that are there are compared with
    config.json, as the loader does, unless ``reads_headers`` is false.

    ``ModelError`` when a model of this configuration cannot be served, ``ConfigError`` when a setting does not fit it.
    """
    config = read_model_config(folder, model_impl)
    check_tokenizer(folder, read_tokenizer(folder, vocab_size=config.vocab_size))
    if enable_expert_parallel:
        config = with_parallel_experts(config)
    has_files = reads_headers and has_weights(folder)
    load_format: LoadFormat = "safetensors" if has_files or config.is_fallback else "dummy"
    config, _ = check_folder(config, folder, load_format, quantization, warns=False)
    Shard(0, tensor_parallel_size).check(config)
    chosen = choose_dtype(config, dtype)
    length = choose_length(config, max_model_len)
    layout: KVCacheLayout | None
    read: int | None = None
    cached = choose_cache_dtype(kv_cache_dtype, config, chosen, torch.device("cpu"))
    if config.is_fallback:
        sizes, _ = read_sizes(folder, config, chosen, tensor_parallel_size, has_files=has_files)
        num_bytes, layout, read = sizes.weight_bytes, sizes.layout, sizes.decoding_bytes
    else:
        last = Shard(tensor_parallel_size - 1, tensor_parallel_size)  # of an odd number of experts it has one more
        num_bytes = weight_bytes(config, chosen, is_widened=False, shard=last)
        read = decoding_bytes(config, chosen, last)
        layout = cache_layout(config, chosen, last)
    if layout is None:
        return ModelEstimate(config, chosen, length, num_bytes, decoding_bytes=read)
    num_parts = tensor_parallel_size  # the layout is that of a rank, each of which has one head at least
    each, windowed, kept = num_parts * layout.bytes_per_token(cached.itemsize), 0, None
    if (request := window_request(layout, cached, length, 1)) is not None:
        windowed, kept = num_parts * request.bytes_per_token, request.reach.window + request.reach.num_rewind_tokens
    longest = (each - windowed) * length + windowed * (kept or 0)
    states = 0 if layout.states is None else num_parts * layout.states.bytes_per_slot(chosen.itemsize)
    return ModelEstimate(config, chosen, length, num_bytes, each, longest, kept, states, read)
