"""Layers of a target whose hidden states its draft head reads, as far as their ``config.json`` say so without torch.

Owns nothing of what is valid: the loader checks both files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.config import Settings, TargetSettings
from outrider.config.fields import DraftMethod
from outrider.draft_head_layers import dflash_layers, eagle3_layers
from outrider.limits.bounded_files import read_of_folder
from outrider.types import LAST_HIDDEN_STATE

_log = logging.getLogger(__name__)

_OF_LAST_STATES = (DraftMethod.EAGLE, DraftMethod.MTP, DraftMethod.MEDUSA, DraftMethod.MLP_SPECULATOR)
"""Methods whose heads read what the target's own head reads."""


def with_layers_of_head(settings: Settings) -> Settings:
    """The settings with the layers that the draft's head reads as those of the target's CUDA graphs, so that none is
    captured anew while requests run. Unchanged where they are set, or the files do not say.
    """
    target, draft = settings.target, settings.draft
    if target.hidden_state_layers is not None:
        return settings
    layers = _layers_of_head(draft.method, draft.model, target.model)
    return replace(settings, target=_with_layers(target, layers)) if layers else settings


def with_layers_of_folder(target: TargetSettings) -> TargetSettings:
    """The settings with numbers of layers in place of the method and folder of a head; with none, and a warning, where
    the files do not say.
    """
    method, is_folder, folder = (target.hidden_state_layers or "").partition(":")
    if not is_folder:
        return target
    layers = _layers_of_head(DraftMethod(method), folder, target.model)
    if not layers:
        _log.warning(
            "the config.json of %s and %s do not say which layers %s reads: graphs are captured again when they are"
            " asked for", folder, target.model, method,
        )  # fmt: skip
    return _with_layers(target, layers)


def _with_layers(target: TargetSettings, layers: Sequence[int]) -> TargetSettings:
    return target.model_copy(update={"hidden_state_layers": ",".join(map(str, layers)) or None})


def _layers_of_head(method: DraftMethod, folder: str | None, target_folder: str) -> list[int]:
    if method in _OF_LAST_STATES:
        return [LAST_HIDDEN_STATE]
    if method not in (DraftMethod.EAGLE3, DraftMethod.DFLASH) or folder is None:
        return []
    config, count = _config_of(folder), _num_layers(_config_of(target_folder))
    is_block = method is DraftMethod.DFLASH
    named = (dflash_layers if is_block else eagle3_layers)(config, count)
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer <= count - is_block for layer in named):
        return []
    return [LAST_HIDDEN_STATE if layer == count - 1 else layer + 1 for layer in named] if is_block else named


def _config_of(folder: str) -> Mapping[str, Any]:
    """Content of a model's config.json; empty if it cannot be read."""
    try:
        content = json.loads(read_of_folder(Path(folder), "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _num_layers(config: Mapping[str, Any]) -> int:
    """Layers of a model, which may be the text part of its folder; 0 where they are not known."""
    part = config.get("text_config")
    count = config.get("num_hidden_layers", part.get("num_hidden_layers") if isinstance(part, dict) else None)
    return count if type(count) is int else 0
