"""Configuration of a draft head, as the projects that publish such heads write it.

* SafeAILab (``LlamaForCausalLMEagle3``): the layer's fields and ``draft_vocab_size`` side by side; see
  github.com/SafeAILab/EAGLE, ``eagle/model/cnets.py``.
* Speculators (``Eagle3Speculator``): the layer's fields in ``transformer_layer_config``, beside them
  ``draft_vocab_size``, ``target_hidden_size``, ``eagle_aux_hidden_state_layer_ids`` and which norms there are; see
  github.com/vllm-project/speculators, ``src/speculators/models/eagle3``.
* NVIDIA (``LlamaForCausalLMEagle3``): SafeAILab's, with layers and norms in ``eagle_config``.

Layer ids are vLLM's in both: j is the stream after j layers, 0 the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.draft_head_layers import eagle3_field, eagle3_layers
from outrider.errors import ModelError
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.config_reader import config_of_fields, read_model_config
from outrider.model_executor.models.json_files import read_object, shown

_FIXED_ROPES = ("default", "llama3")
"""Ropes whose angles do not depend on the longest position."""
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3LlamaForCausalLM", "Eagle3DraftModel")
_MAX_NUMBER = 1 << 24


@dataclass(frozen=True, slots=True)
class DraftHeadConfig:
    """One head and what it reads."""

    layer: ModelConfig
    """Decoder layer; ``vocab_size`` and ``max_position`` are the target's."""
    draft_vocab_size: int
    hidden_state_layers: tuple[int, ...]
    target_hidden_size: int
    norm_before_residual: bool = False
    """True if the stream is the normalised state."""
    norm_before_fc: bool = False
    """True if the target's states, side by side, are normalised together before ``fc``."""
    fc_norm: bool = False
    """True if each layer's state is normalised before ``fc``, as in EAGLE 3.1."""
    norm_output: bool = False
    """True if the head's own state is taken after the last norm."""


def read_eagle3_config(folder: Path, target_folder: Path) -> DraftHeadConfig:
    """Configuration of an EAGLE-3 head from its folder and its target's; ``ModelError`` for another head or target."""
    path = folder / "config.json"
    raw, target = read_object(path), read_model_config(target_folder)
    check_architecture(path, raw, _ARCHITECTURES, "EAGLE-3 head")
    nested = raw.get("transformer_layer_config", raw)
    if not isinstance(nested, dict):
        raise ModelError(f"{path}: transformer_layer_config should be an object, not {str(nested)[:40]}")
    layer = read_layer(path, nested, target)
    draft_vocab_size = read_number(path, raw, "draft_vocab_size", layer.vocab_size)
    hidden_size = read_number(path, raw, "target_hidden_size", layer.hidden_size)
    if hidden_size != target.hidden_size:
        raise ModelError(
            f"{path}: the head reads states of {hidden_size} values, and those of {target_folder} have"
            f" {target.hidden_size}"
        )
    if layer.hidden_size != target.hidden_size and not isinstance(raw.get("target_hidden_size"), int):
        raise ModelError(f"{path}: target_hidden_size is missing")
    return DraftHeadConfig(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        hidden_state_layers=_layers(path, raw, target),
        target_hidden_size=hidden_size,
        **{name: _flag(path, raw, name) for name in _NORMS},
    )


def check_architecture(path: Path, raw: dict[str, Any], known: Sequence[str], kind: str) -> None:
    """Raise ``ModelError`` unless ``architectures`` of a config.json names one of ``known``."""
    named = raw.get("architectures") or ["nothing"]
    if not isinstance(named, list):
        raise ModelError(f'{path}: architectures should be a list such as ["{known[0]}"], not {shown(named)}')
    if named[0] not in known:
        raise ModelError(f"{path}: {str(named[0])[:60]} is no {kind}; such are {', '.join(known)}")


def read_layer(path: Path, fields: dict[str, Any], target: ModelConfig) -> ModelConfig:
    """The one decoder layer of a head for ``target``, with Llama's fields; ``ModelError`` for another target's."""
    count = fields.get("num_hidden_layers")
    if count != 1:  # said before anything is made for each of them
        raise ModelError(f"{path}: num_hidden_layers is {shown(count)}; heads of one layer are supported")
    layer = config_of_fields(path, {**fields, "model_type": "llama"}, "LlamaForCausalLM")
    return for_target(path, layer, target)


def for_target(path: Path, layer: ModelConfig, target: ModelConfig) -> ModelConfig:
    """A head's decoder with the target's longest position; ``ModelError`` for another vocabulary."""
    if layer.vocab_size != target.vocab_size:
        raise ModelError(f"{path}: vocab_size is {layer.vocab_size}, and the target's is {target.vocab_size}")
    longest = target.max_position if layer.rope.rope_type in _FIXED_ROPES else layer.max_position
    return replace(layer, max_position=longest, eos_token_ids=target.eos_token_ids)


def _layers(path: Path, raw: dict[str, Any], target: ModelConfig) -> tuple[int, ...]:
    found, count = eagle3_layers(raw, target.num_layers), target.num_layers
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one <= count for one in found) or not found:
        raise ModelError(f"{path}: eagle_aux_hidden_state_layer_ids should be layers from 0 to {count}, not {found}")
    return tuple(found)


def _flag(path: Path, raw: dict[str, Any], name: str) -> bool:
    found = eagle3_field(raw, name)
    if found is not None and type(found) is not bool:
        raise ModelError(f"{path}: {name} should be true or false, not {str(found)[:40]}")
    return bool(found)


def read_number(path: Path, raw: dict[str, Any], name: str, default: int) -> int:
    """A number above 0 of a config.json; ``ModelError`` for what is none."""
    found = raw.get(name)
    if found is None:
        return default
    if type(found) is not int or not 0 < found <= _MAX_NUMBER:
        raise ModelError(f"{path}: {name} should be a number from 1 to {_MAX_NUMBER}, not {str(found)[:40]}")
    return found
