"""Model loader: from a folder to a ``Decoder`` with its weights, and the number of KV pages that there is room for.

The order is: read the configuration, choose length, type and part, read the weights, count the pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypedDict, Unpack

import torch

from outrider.errors import ConfigError, ModelError
from outrider.kernels.fp8_linear import FP8
from outrider.kernels.invariance import obstacle
from outrider.kv_cache import KVCacheLayout
from outrider.kv_cache.sizing import (
    DEFAULT_FORWARD_TOKENS,
    DEFAULT_MAX_SEQUENCES,
    CacheSize,
    KVCacheRequest,
    WindowRequest,
)
from outrider.model_executor.distributed.communicator import SINGLE_RANK, Communicator
from outrider.model_executor.distributed.sharding import EXPERT_SETTING
from outrider.model_executor.kv_cache_sizing import (
    check_weights_fit,
    choose_cache_size,
    explaining_out_of_memory,
    graph_bytes,
)
from outrider.model_executor.layers.quantization import ONLINE
from outrider.model_executor.loader.checkpoint import StoredTensor, read_checkpoint, read_family_tensors
from outrider.model_executor.loader.fallback import check_fallback, load_fallback
from outrider.model_executor.loader.kv_scales import read_kv_scales
from outrider.model_executor.loader.stacked_experts import with_stored_experts
from outrider.model_executor.loader.stored_head import with_stored_head
from outrider.model_executor.loader.weights import Progress, fill_weights, load_weights
from outrider.model_executor.models import AttentionWindow, Decoder, ModelConfig, read_model_config
from outrider.model_executor.models.dummy import noise
from outrider.model_executor.models.families import family_of
from outrider.model_executor.synthetic.recipe import synthetic_tensors
from outrider.model_executor.worker_commands import WorkerCommand

_log = logging.getLogger(__name__)
_WIDEST_HEAD = 128
_COMPARED_HEADS = (8, 16, 32, 64, 80, 128, 256)
"""Values of a head for which the bits of attention were compared on a GPU."""
_LARGEST_OF_FEW_TOKENS = 2048
"""Hidden size up to which ``kernels.gemv`` computes single tokens."""
_FP8_CAPABILITY = (8, 9)
LoadFormat = Literal["safetensors", "dummy", "synthetic"]
ModelImplementation = Literal["auto", "native", "transformers"]
QuantizationName = Literal["none", "fp8"]
KVCacheDtype = Literal["auto", "model", "fp8"]
BatchInvariance = Literal["auto", "on", "off"]
Publish = Callable[[WorkerCommand], None]
"""Called with a command that is about to be run; returns when nothing of the command is needed any more."""


class Ranks(Protocol):
    """The processes that share a model, as one of them sees them while it loads its part."""

    @property
    def publish(self) -> Publish | None:
        """Function by which rank 0 sends a command to the other ranks; None on those."""
        ...

    def open_communicator(self, device: torch.device, dtype: torch.dtype) -> Communicator:
        """Open the communicator of the ranks; every rank calls it at the same point."""
        ...

    def least(self, value: int) -> int:
        """The least of what they say; every rank calls it at the same point."""
        ...

    def close(self) -> None:
        """End together."""
        ...


class LoadOptions(TypedDict, total=False):
    """Options of ``load_model`` that its callers pass on."""

    device: torch.device | str
    dtype: torch.dtype | str
    """"auto": the type of the weights on file."""
    page_size: int
    num_pages: int | None
    kv_cache_bytes: int | None
    gpu_memory_utilization: float | None
    max_model_len: int | None
    """None: the model's own limit."""
    load_format: LoadFormat
    """"dummy": only config.json is read, and the weights are noise, made on the device, for measuring shapes;
    "synthetic": weights by the folder's recipe."""
    progress: Progress | None
    """Called with bytes of weights: done, total."""
    ranks: Ranks | None
    attention_window: AttentionWindow | None
    """Tokens that a layer attends to at most: for drafts, whose tokens a target judges."""
    quantization: QuantizationName
    """"fp8": weights that are not quantized on file become FP8."""
    kv_cache_dtype: KVCacheDtype
    """"fp8": keys and values are FP8 in the cache."""
    model_impl: ModelImplementation
    """Code that computes the layers; "auto": ours where there is a family for it, else transformers'."""
    batch_invariant: BatchInvariance
    """"on": a token's results do not depend on the batch, or ``ConfigError``; "auto": so where it costs little."""
    num_state_slots: int | None
    enable_expert_parallel: bool
    """True if each of several ranks holds some experts whole."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute, and the size of its KV cache."""

    model: Decoder
    page_size: int
    num_pages: int
    max_model_len: int
    kv_cache_dtype: torch.dtype
    num_state_slots: int = 0
    """Sequences and snapshots whose states in recurrent layers there is room for."""
    num_window_pages: int = 0
    """Pages of layers with a window, where others see everything; 0: pages are those of all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """``LoadOptions`` with their defaults."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype | str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    load_format: LoadFormat = "safetensors"
    progress: Progress | None = None
    ranks: Ranks | None = None
    attention_window: AttentionWindow | None = None
    quantization: QuantizationName = "none"
    kv_cache_dtype: KVCacheDtype = "auto"
    model_impl: ModelImplementation = "auto"
    batch_invariant: BatchInvariance = "off"
    num_state_slots: int | None = None
    enable_expert_parallel: bool = False


def load_model(
    folder: Path,
    *,
    max_sequences: int = DEFAULT_MAX_SEQUENCES,
    forward_tokens: int = DEFAULT_FORWARD_TOKENS,
    graph_memory_bytes: int | None = None,
    **options: Unpack[LoadOptions],
) -> LoadedModel:
    """Load a folder in the Hugging Face layout.

    ``graph_memory_bytes`` is the limit of CUDA graphs, which the cache leaves free; ``forward_tokens`` are those of the
    largest forward. ``ModelError`` when the folder cannot be served, ``ConfigError`` when a setting does not fit it.
    """
    given = _Options(**options)
    config = replace(read_model_config(folder, given.model_impl), attention_window=given.attention_window)
    if given.enable_expert_parallel:
        config = with_parallel_experts(config)
    config, stored = check_folder(
        config, folder, given.load_format, given.quantization,
        warns=given.ranks is None or given.ranks.publish is not None,  # of several ranks one
    )  # fmt: skip
    length = choose_length(config, given.max_model_len)
    config = config.for_length(length)
    chosen_dtype, chosen_device = choose_dtype(config, given.dtype), torch.device(given.device)
    cached_dtype = choose_cache_dtype(given.kv_cache_dtype, config, chosen_dtype, chosen_device)
    with torch.inference_mode(), explaining_out_of_memory(chosen_device):
        communicator = (
            SINGLE_RANK if given.ranks is None else given.ranks.open_communicator(chosen_device, chosen_dtype)
        )
        communicator.shard.check(config)
        num_ranks = communicator.shard.size
        keeps_order = is_batch_invariant(
            given.batch_invariant, config, chosen_dtype, chosen_device, num_ranks=num_ranks, cached_dtype=cached_dtype
        )
        if keeps_order:
            communicator = communicator.in_rank_order()
        decoder = _load_decoder(
            folder, config, given.load_format, communicator, keeps_order=keeps_order, stored=stored,
            progress=given.progress,
            dtype=chosen_dtype, device=chosen_device, cached_dtype=cached_dtype,
        )  # fmt: skip
        layout = decoder.kv_cache_layout
        request = KVCacheRequest(
            given.page_size, length, layout.bytes_per_token(cached_dtype.itemsize), given.num_pages,
            given.kv_cache_bytes, given.gpu_memory_utilization, max_sequences, num_state_slots=given.num_state_slots,
            slot_bytes=0 if layout.states is None else layout.states.bytes_per_slot(chosen_dtype.itemsize),
            window=window_request(layout, cached_dtype, length, forward_tokens),
        )  # fmt: skip
        size = _choose_size(request, chosen_device, graph_memory_bytes, given.ranks)
        return LoadedModel(
            decoder, given.page_size, size.num_pages, length, cached_dtype, size.num_state_slots, size.num_window_pages
        )


def _load_decoder(
    folder: Path,
    config: ModelConfig,
    load_format: LoadFormat,
    communicator: Communicator,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cached_dtype: torch.dtype,
    keeps_order: bool,
    stored: dict[str, StoredTensor],
    progress: Progress | None,
) -> Decoder:
    """Decoder of the folder with its weights: ours, or transformers' own code."""
    if config.is_fallback:
        return load_fallback(
            folder, config, dtype, device, progress=progress, communicator=communicator,
            has_kv_scales=cached_dtype == FP8,
        )  # fmt: skip
    check_weights_fit(config, dtype, device, communicator.shard)
    decoder = Decoder(config, dtype=dtype, device=device, communicator=communicator, batch_invariant=keeps_order)
    _fill(decoder, folder, load_format, progress, stored=stored, has_kv_scales=cached_dtype == FP8)
    return decoder


def is_text_part(config: ModelConfig) -> bool:
    """True if the checkpoint's model takes images or sound too, and its text part is served."""
    if config.is_fallback:
        from outrider.model_executor.models.fallback_config import has_other_parts  # imports all of transformers

        return has_other_parts(config.architecture)
    return family_of(config.architecture).is_text_part


def with_parallel_experts(config: ModelConfig) -> ModelConfig:
    """The configuration with whole experts on each rank; ``ConfigError`` for a model that cannot have that."""
    if config.is_fallback:
        raise ConfigError(EXPERT_SETTING, f"must be off for {config.architecture}, which runs through transformers")
    if config.experts is None:
        raise ConfigError(EXPERT_SETTING, f"is set, and {config.architecture} has no experts that ranks could divide")
    return replace(config, experts=replace(config.experts, is_parallel=True))


def window_request(
    layout: KVCacheLayout, dtype: torch.dtype, max_model_len: int, forward_tokens: int
) -> WindowRequest | None:
    """Cache request of layers with a window, if sequences outgrow the window and others see everything, or None."""
    reach = layout.window_reach
    if reach is None or max_model_len <= reach.window + reach.num_rewind_tokens:
        return None
    return WindowRequest(reach, layout.window_bytes_per_token(dtype.itemsize), min(forward_tokens, max_model_len))


def check_folder(
    config: ModelConfig,
    folder: Path,
    load_format: LoadFormat,
    quantization: QuantizationName,
    *,
    warns: bool,
) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """Configuration with the quantization that is set and the head that the folder stores, and its tensors if they are
    to be read here.

    Raises before memory is taken for what config.json promises.
    """
    if quantization == "fp8":
        config = replace(config, quantization=config.quantization or ONLINE)
    if load_format == "synthetic" and (config.experts is not None or config.recurrent is not None):
        kind = "experts" if config.experts is not None else "recurrent layers"
        raise ModelError(f"{folder}: load_format synthetic makes no models with {kind}; dummy does")
    if warns and is_text_part(config):
        _log.warning("%s: only text is served of %s: images and sound are refused", folder, config.architecture)
    if config.is_fallback:
        check_fallback(config, load_format=load_format)
    elif load_format == "safetensors":
        read = read_family_tensors(folder, config)
        config = with_stored_experts(with_stored_head(folder, config, read.tensors), read.tensors)
        return config, read_checkpoint(folder, config, warns=warns, read=read)
    return config, {}


def _fill(
    decoder: Decoder,
    folder: Path,
    load_format: LoadFormat,
    progress: Progress | None,
    *,
    stored: dict[str, StoredTensor],
    has_kv_scales: bool,
) -> None:
    """Weights of the folder, of its recipe, or noise, as ``load_format`` says."""
    if load_format == "dummy":
        fill_weights(decoder, noise(decoder))
    elif load_format == "synthetic":
        fill_weights(decoder, synthetic_tensors(folder, decoder.config, decoder.dtype, decoder.device))
    else:
        load_weights(decoder, stored, progress)
        if has_kv_scales:
            read_kv_scales(decoder, stored)


def _choose_size(
    request: KVCacheRequest, device: torch.device, graph_memory_bytes: int | None, ranks: Ranks | None
) -> CacheSize:
    """Size of the cache, the same on every rank."""
    kept_bytes = graph_bytes(graph_memory_bytes, device) or 0
    size = choose_cache_size(request, device, kept_bytes=kept_bytes)
    if ranks is None:
        return size
    return CacheSize(*map(ranks.least, (size.num_pages, size.num_window_pages, size.num_state_slots)))


def choose_cache_dtype(
    setting: KVCacheDtype, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Type of keys and values; ``ConfigError`` for one that the device has no numbers of."""
    has_numbers = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    if setting == "auto":
        asks = config.quantization is not None and config.quantization.has_fp8_cache
        return FP8 if asks and has_numbers else dtype
    if setting == "model":
        return dtype
    if not has_numbers:
        raise ConfigError("kv_cache_dtype", f"fp8 needs compute capability 8.9 or higher, which {device} has not")
    return FP8


def is_batch_invariant(
    setting: BatchInvariance,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_ranks: int,
    cached_dtype: torch.dtype | None = None,
) -> bool:
    """Mode that a setting means for a model; ``ConfigError`` where it is "on" and cannot be.

    ``cached_dtype`` is that of the KV cache; None: the model's.
    """
    reason = obstacle(device, dtype)
    if config.quantization is not None and not config.quantization.keeps_order:
        reason = f"products with weights that are {config.quantization} do not keep one order of sums"
    if config.is_fallback:
        reason = "the code of transformers, which computes this model, promises no order of sums"
    if config.variant.has_wide_qk_norm and num_ranks > 1:
        reason = "queries and keys are normalised over heads of several ranks, whose sums have no fixed order"
    heads = {own.head_dim for own in config.layer_sizes} or {config.head_dim}
    if others := heads.difference(_COMPARED_HEADS):
        *most, last = _COMPARED_HEADS
        compared = f"{', '.join(map(str, most))} and {last}"
        reason = f"attention with heads of {max(others)} values was not compared bit by bit; heads of {compared} were"
    if setting == "on" and reason is not None:
        raise ConfigError("batch_invariant", f"cannot be on: {reason}")
    # On several GPUs, over FP8 caches, and in the interpreter, only where it is asked for.
    may_be_chosen = reason is None and num_ranks == 1 and device.type == "cuda" and cached_dtype in {None, dtype}
    return setting == "on" or (setting == "auto" and may_be_chosen and _was_measured(config))


def _was_measured(config: ModelConfig) -> bool:
    """True for models whose decoding was measured to take about as long in either mode: dense ones of 16 bits without
    recurrent layers or wide heads, and without products that have faster kernels for single tokens in the other mode.
    """
    is_dense = config.experts is None and config.recurrent is None and config.quantization is None
    return is_dense and config.head_dim <= _WIDEST_HEAD and config.hidden_size > _LARGEST_OF_FEW_TOKENS


def choose_length(config: ModelConfig, max_model_len: int | None) -> int:
    """Tokens of the longest sequence: the model's own where None; ``ConfigError`` for more than that."""
    if max_model_len is None:
        return config.default_length
    if not 1 <= max_model_len <= config.max_position:
        raise ConfigError("max_model_len", f"must be from 1 to {config.max_position}, not {max_model_len}")
    return max_model_len


def choose_dtype(config: ModelConfig, dtype: torch.dtype | str) -> torch.dtype:
    """Type of activations: that of the weights on file for "auto"; ``ConfigError`` for one that is no float."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return config.dtype
    chosen = getattr(torch, dtype, None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ConfigError("dtype", f"{dtype!r} is not auto, float32, bfloat16 or float16")
    return chosen
