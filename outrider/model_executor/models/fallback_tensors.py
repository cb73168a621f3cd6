"""Tensors on file of models that transformers' code computes: what the files lack is found by their shapes alone, by
the code that loads them, which knows each model's names on file.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from outrider.errors import ModelError
from outrider.model_executor.models.config_reader import without_warnings
from outrider.model_executor.models.fallback_config import TEXT_PART_NAMES, has_other_parts
from outrider.model_executor.models.fallback_progress import reporting_progress
from outrider.model_executor.models.weights import KV_SCALES

_log = logging.getLogger(__name__)


def key_mapping_of(made: PreTrainedConfig, raw: Mapping[str, Any]) -> dict[str, str] | None:
    """Names that transformers should change in the files of a whole model of which the text part is ``made``."""
    return None if made.model_type == raw["model_type"] else TEXT_PART_NAMES


def check_shapes(
    model: Any,  # noqa: ANN401 - transformers' own class
    shapes: Mapping[str, Sequence[int]],
    key_mapping: dict[str, str] | None,
) -> None:
    """Raise ``ModelError`` unless files with tensors of these ``shapes`` have all that a ``model`` on the meta device
    needs: transformers loads them into it, without numbers.
    """
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    given = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model, key_mapping), device_map={"": torch.device("meta")},
        dtype=torch.get_default_dtype(), ignore_mismatched_sizes=True,
    )  # fmt: skip
    with without_warnings(), reporting_progress(None, 0):
        found, _ = type(model)._load_pretrained_model(model, tensors, None, given)
        if failed := found.conversion_errors:
            raise ModelError(f"tensor {_some(failed)} missing in part from the safetensors files, or of another shape")
        found = type(model)._finalize_model_loading(model, given, found)
    check_loaded({"missing_keys": found.missing_keys, "mismatched_keys": found.mismatched_keys})


def check_loaded(found: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` for tensors that transformers ``found`` missing, or of another shape: it draws them at
    random.
    """
    if missing := found["missing_keys"]:
        raise ModelError(f"tensor {_some(missing)} missing from the safetensors files")
    if mismatched := found["mismatched_keys"]:
        name, stored, wanted = min(mismatched)
        raise ModelError(f"{name} has shape {list(stored)}; config.json asks for {list(wanted)}")


def warn_of_unused(architecture: str, found: Mapping[str, Any], scales: Collection[str]) -> None:
    """Name tensors that are left out in a warning, but not the ``scales``, nor parts for images and sound."""
    unused = {name for name in found["unexpected_keys"] if name not in scales and not name.endswith(KV_SCALES)}
    if unused and not has_other_parts(architecture):
        _log.warning("tensor %s not used: no part of a %s", _some(unused), architecture)


def _some(names: Collection[str]) -> str:
    return f"{min(names)} is" if len(names) == 1 else f"{min(names)} and {len(names) - 1} more are"
