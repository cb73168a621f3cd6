"""Loading of models that transformers' code computes: what is refused before their weights are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.errors import ConfigError, ModelError
from outrider.limits.bounded_files import MAX_INDEX_BYTES
from outrider.model_executor.distributed.communicator import SINGLE_RANK, Communicator
from outrider.model_executor.kv_cache_sizing import check_bytes_fit
from outrider.model_executor.layers.contract import WeightTarget, whole
from outrider.model_executor.loader.checkpoint import INDEX_NAME, StoredTensor, check_tensor, read_tensors
from outrider.model_executor.loader.kv_scales import read_kv_scales
from outrider.model_executor.loader.weights import Progress, copy_tensors
from outrider.model_executor.models import FALLBACK_SPEED, Decoder, ModelConfig
from outrider.model_executor.models.json_files import is_there, read_object

if TYPE_CHECKING:
    from outrider.model_executor.models.fallback import FallbackSizes

_log = logging.getLogger(__name__)


def check_fallback(config: ModelConfig, *, load_format: str) -> None:
    """Raise ``ConfigError`` for a setting that a model has not that transformers' code computes."""
    name = config.architecture
    if load_format != "safetensors":
        raise ConfigError("load_format", f"must be safetensors for {name}, which runs through transformers")
    if config.attention_window is not None:
        raise ConfigError("attention_window", f"is not supported for {name}, which runs through transformers")


def read_sizes(
    folder: Path, config: ModelConfig, dtype: torch.dtype, num_ranks: int, *, has_files: bool = True
) -> tuple[FallbackSizes, dict[str, StoredTensor]]:
    """Memory of a rank, and the tensors of the folder's files if it ``has_files``; ``ModelError`` where their headers
    are not those of a model of this ``config``, and where transformers cannot run that with our attention.
    """
    from outrider.model_executor.models.fallback import estimate_sizes  # imports all of transformers

    if not has_files:
        return estimate_sizes(folder, config, dtype, num_ranks), {}
    tensors = _read_files(folder)
    sizes = estimate_sizes(folder, config, dtype, num_ranks, {name: tensor.shape for name, tensor in tensors.items()})
    if sizes.is_text_part:
        from outrider.model_executor.models.fallback_config import name_in_text_part  # imports all of transformers

        names = {name: name_in_text_part(name) for name in tensors}
        tensors = {names[name]: replace(tensor, name=names[name]) for name, tensor in tensors.items()}
    _check_quantized(folder, tensors, sizes.quantized)
    return sizes, tensors


def _read_files(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX_NAME
    if is_there(index) and "metadata" not in read_object(index, MAX_INDEX_BYTES, may_be_elsewhere=True):
        raise ModelError(f"{index} has no metadata, without which transformers does not read it: add an empty object")
    return read_tensors(folder, is_whole=True)


def _check_quantized(folder: Path, tensors: dict[str, StoredTensor], quantized: Mapping[str, WeightTarget]) -> None:
    """Raise ``ModelError`` where the FP8 tensors on file are not those that config.json asks for."""
    for name, tensor in tensors.items():
        if tensor.dtype.startswith("F8") and name not in quantized:
            why = "through transformers only linear layers can be that config.json says are, and no heads"
            raise ModelError(f"{folder}: tensor {name} is FP8, and {why}")
    for name, target in quantized.items():
        if name not in tensors:
            raise ModelError(f"{folder}: tensor {name} of an FP8 layer is missing from the safetensors files")
        check_tensor(tensors[name], target)


def _read_scales(stored: dict[str, StoredTensor], quantized: Mapping[str, WeightTarget]) -> dict[str, torch.Tensor]:
    """Scales of FP8 layers; ``ModelError`` for one that is no positive number."""
    names = [name for name in quantized if not name.endswith((".weight", ".bias"))]
    scales = {name: torch.empty(quantized[name].shape) for name in names}
    copy_tensors([stored[name] for name in names], {name: whole(scale) for name, scale in scales.items()})
    return scales


def load_fallback(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    progress: Progress | None = None,
    communicator: Communicator = SINGLE_RANK,
    has_kv_scales: bool = False,
) -> Decoder:
    """Load a folder, with the scales of an FP8 cache if ``has_kv_scales``; ``ModelError`` where transformers cannot run
    it with our attention, or its files lack tensors.
    """
    # They import all of transformers.
    from outrider.model_executor.models.fallback import TransformersDecoder
    from outrider.model_executor.models.fallback_progress import reporting_progress

    sizes, stored = read_sizes(folder, config, dtype, communicator.shard.size)
    check_bytes_fit(sizes.weight_bytes, config, dtype, device)
    _log.warning(
        "%s: %s runs through transformers: expect %s of native speed", folder, config.architecture, FALLBACK_SPEED
    )
    with reporting_progress(progress, sizes.weight_bytes):
        decoder = TransformersDecoder(
            folder, config, dtype=dtype, device=device, communicator=communicator, groups=sizes.groups,
            scales=_read_scales(stored, sizes.quantized),
        )  # fmt: skip
    if has_kv_scales:
        read_kv_scales(decoder, stored)
    return decoder
