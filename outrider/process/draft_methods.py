"""Method of a draft by its folder, as vLLM infers it: what config.json says, and where that is silent the name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config import DraftSettings
from outrider.config.fields import DraftMethod
from outrider.errors import ConfigError, ModelError
from outrider.limits.bounded_files import read_of_folder

_ARCHITECTURES = {
    "DFlashDraftModel": DraftMethod.DFLASH,
    "Eagle3DraftModel": DraftMethod.EAGLE3,
    "Eagle3LlamaForCausalLM": DraftMethod.EAGLE3,
    "Eagle3Speculator": DraftMethod.EAGLE3,
    "EagleLlamaForCausalLM": DraftMethod.EAGLE,
    "EagleModel": DraftMethod.EAGLE,
    "EagleSpeculator": DraftMethod.EAGLE,
    "LlamaForCausalLMEagle": DraftMethod.EAGLE,
    "LlamaForCausalLMEagle3": DraftMethod.EAGLE3,
    "MLPSpeculatorPreTrainedModel": DraftMethod.MLP_SPECULATOR,
    "MedusaModel": DraftMethod.MEDUSA,
}
_TYPES = {
    "dflash": DraftMethod.DFLASH,
    "eagle": DraftMethod.EAGLE,
    "eagle3": DraftMethod.EAGLE3,
    "medusa": DraftMethod.MEDUSA,
    "mlp_speculator": DraftMethod.MLP_SPECULATOR,
}
"""Values of model_type and speculators_model_type."""
_KEYS = {
    "dflash_config": DraftMethod.DFLASH,
    "medusa_num_heads": DraftMethod.MEDUSA,
    "n_predict": DraftMethod.MLP_SPECULATOR,
}
"""Keys that only these have."""
_NAMES = {"eagle3": DraftMethod.EAGLE3, "eagle-": DraftMethod.EAGLE, "dflash": DraftMethod.DFLASH}
"""Parts of names of checkpoints whose config.json is that of a plain model of one layer."""


def with_draft_method(settings: DraftSettings, name: str) -> DraftSettings:
    """The settings of a draft model with the method of its folder, where that holds a head. ``name``: the draft's as
    the user gave it. ``ModelError`` for a head of a kind that is not supported.
    """
    if settings.method is not DraftMethod.DRAFT_MODEL or settings.model is None:
        return settings
    method = infer_method(_read(Path(settings.model) / "config.json"), name)
    if method is DraftMethod.DRAFT_MODEL:
        return settings
    if settings.tensor_parallel_size != 1:
        problem = f"is {settings.tensor_parallel_size}; a head runs on one GPU, and {name} is one of method {method}"
        raise ConfigError("draft.tensor_parallel_size", problem)
    if settings.attention_window is not None:
        raise ConfigError("draft.attention_window", f"is set, and {name} is a head of method {method}, which has none")
    return settings.model_copy(update={"method": method})


def infer_method(config: Mapping[str, Any], name: str) -> DraftMethod:
    """The method for a draft with this config.json and name."""
    architecture = str((_list(config.get("architectures")) or [""])[0])
    kinds = {str(config.get(key)) for key in ("model_type", "speculators_model_type")}
    if any(kind.endswith("mtp") for kind in kinds):
        raise ModelError(
            f"draft model: {name} holds MTP layers ({config['model_type']}); of these those inside the folder of a"
            " MiMo, Qwen3.5 or Qwen3-Next target are supported, by method mtp without a draft model"
        )
    found = [_ARCHITECTURES.get(architecture), *map(_TYPES.get, kinds), *(_KEYS[key] for key in _KEYS if key in config)]
    if config.get("num_hidden_layers") == 1:
        last = Path(name).name.lower()
        found += [method for part, method in _NAMES.items() if part in last]
    return next(filter(None, found), DraftMethod.DRAFT_MODEL)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _read(path: Path) -> Mapping[str, Any]:
    """Content of a JSON file; empty if it cannot be read, since loading reports what is wrong with it."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_of_folder(path.parent, path.name))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
