"""Configuration of a DFlash drafter, as the projects that publish such drafters write it.

* z-lab (``DFlashDraftModel``): Qwen3's fields and ``block_size`` side by side, and ``dflash_config`` with
  ``mask_token_id`` and ``target_layer_ids``, which count layers from 0 and mean what comes out of them; see
  github.com/z-lab/dflash, ``dflash/model.py``.
* Speculators (``speculators_model_type`` dflash): Qwen3's fields in ``transformer_layer_config``, the rest beside it;
  ``aux_hidden_state_layer_ids`` are vLLM's, j is the stream after j layers; see github.com/vllm-project/speculators,
  ``src/speculators/models/dflash/config.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.draft_head_layers import dflash_layers
from outrider.errors import ModelError
from outrider.model_executor.draft_heads.config import check_architecture, for_target, read_number
from outrider.model_executor.loader.checkpoint import read_tensors
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.config_reader import config_of_fields, read_model_config
from outrider.model_executor.models.json_files import read_object, shown
from outrider.types import LAST_HIDDEN_STATE

_Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """One block drafter and what it reads."""

    layer: ModelConfig
    """Decoder; ``vocab_size`` and ``max_position`` are the target's."""
    hidden_state_layers: tuple[int, ...]
    block_size: int
    """Queries of a block at most, the newest token among them."""
    mask_token_id: int
    draft_vocab_size: int
    """Tokens that it drafts; those of the target or fewer."""

    @property
    def target_hidden_size(self) -> int:
        """Size of one layer's state."""
        return self.layer.hidden_size


def read_dflash_config(folder: Path, target_folder: Path) -> DFlashConfig:
    """Configuration of a DFlash head from its folder and its target's; ``ModelError`` for another head or target."""
    path = folder / "config.json"
    raw, target = read_object(path), read_model_config(target_folder)
    fields, own = _of_speculators(path, raw) if "speculators_model_type" in raw else _of_z_lab(path, raw)
    _check_num_layers(path, fields)
    fields = {**fields, "model_type": "qwen3", **_windows(path, fields, own)}
    layer = for_target(path, config_of_fields(path, fields, "Qwen3ForCausalLM"), target)
    if own.get("causal"):
        raise ModelError(f"{path}: a DFlash drafter whose blocks attend in both directions is supported, and no other")
    if layer.hidden_size != target.hidden_size:
        raise ModelError(
            f"{path}: hidden_size is {layer.hidden_size}, and a DFlash drafter for {target_folder} has the target's,"
            f" {target.hidden_size}"
        )
    block_size, mask_token_id = (read_number(path, own, name, 0) for name in ("block_size", "mask_token_id"))
    if block_size < 2 or not 0 < mask_token_id < layer.vocab_size:
        raise ModelError(
            f"{path}: block_size should be above 1 and mask_token_id an id below {layer.vocab_size}; they are"
            f" {block_size} and {mask_token_id}"
        )
    if layer.sliding_window is not None and layer.sliding_window < block_size:
        raise ModelError(f"{path}: a block of {block_size} tokens does not fit a window of {layer.sliding_window}")
    draft_vocab_size = read_number(path, own, "draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise ModelError(f"{path}: draft_vocab_size is {draft_vocab_size}, above the target's {layer.vocab_size}")
    return DFlashConfig(layer, _layers(path, raw, target), block_size, mask_token_id, draft_vocab_size)


def _check_num_layers(path: Path, fields: _Fields) -> None:
    """Raise ``ModelError`` for more layers than the folder has tensors, before anything is made for each of them."""
    count, num_tensors = fields.get("num_hidden_layers"), len(read_tensors(path.parent))
    if isinstance(count, int) and count > num_tensors:
        raise ModelError(
            f"{path}: num_hidden_layers is {shown(count)}, and the safetensors files beside it have {num_tensors}"
            " tensors in all; it should be the number of the drafter's layers"
        )


def _windows(path: Path, fields: _Fields, own: _Fields) -> _Fields:
    """Qwen3's fields of sliding windows. ``layer_types`` decides, as in ``dflash/model.py``, where Qwen3 asks for
    ``use_sliding_window`` too; with ``use_swa``, NVIDIA's and MiMo's key, every layer has one.
    """
    if not own.get("use_swa"):
        types = fields.get("layer_types")
        return {"use_sliding_window": isinstance(types, list) and "sliding_attention" in types}
    window = own.get("swa_window_size") or fields.get("sliding_window")
    if type(window) is not int or window < 1:
        raise ModelError(f"{path}: with use_swa, swa_window_size should be a number above 0, not {str(window)[:40]}")
    count = read_number(path, fields, "num_hidden_layers", 1)
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * count}


def _of_z_lab(path: Path, raw: _Fields) -> tuple[_Fields, _Fields]:
    """Qwen3's fields, and what is DFlash's own."""
    check_architecture(path, raw, ("DFlashDraftModel",), "DFlash drafter")
    own = raw.get("dflash_config")
    if not isinstance(own, dict):
        raise ModelError(f"{path}: dflash_config is missing; a DFlash drafter has mask_token_id in it")
    # Where the block's size stands differs by release.
    return raw, {"block_size": raw.get("block_size"), "draft_vocab_size": raw.get("draft_vocab_size"), **own}


def _of_speculators(path: Path, raw: _Fields) -> tuple[_Fields, _Fields]:
    """The same of the Speculators format."""
    fields = raw.get("transformer_layer_config")
    if raw.get("speculators_model_type") != "dflash" or not isinstance(fields, dict):
        raise ModelError(f"{path}: a DFlash drafter has speculators_model_type dflash and a transformer_layer_config")
    if raw.get("sample_from_anchor"):
        raise ModelError(f"{path}: a DFlash drafter that drafts from its masks alone is supported (sample_from_anchor)")
    return fields, raw


def _layers(path: Path, raw: _Fields, target: ModelConfig) -> tuple[int, ...]:
    """The drafter's layers as a target numbers its states: what comes out of the last one is normalised."""
    count = target.num_layers
    found = dflash_layers(raw, count)
    if not isinstance(found, list) or not found or not all(type(one) is int and 0 <= one < count for one in found):
        raise ModelError(f"{path}: target_layer_ids should be layers from 0 to {count - 1}, not {found}")
    return tuple(LAST_HIDDEN_STATE if one == count - 1 else one + 1 for one in found)
