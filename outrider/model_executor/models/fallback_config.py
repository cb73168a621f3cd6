"""Configuration of a model that transformers' modelling code computes, for want of a family of our own.

Says of what transformers knows, and of no code in the folder, whether its attention can be replaced by ours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.errors import ModelError
from outrider.model_executor.layers.quantization import Numbers
from outrider.model_executor.models.config import ModelConfig, RopeConfig
from outrider.model_executor.models.config_schema import without_code
from outrider.model_executor.models.json_files import one_line, shown
from outrider.model_executor.models.quantization_reader import read_quantization

_MAX_LAYERS = 1000
"""transformers makes a module for each before their number can be compared with that of the files' tensors."""
_ROPE_TYPES = {"default", *ROPE_INIT_FUNCTIONS} - {"dynamic", "longrope"}
"""Rope types without those of which transformers takes the frequencies of the longest sequence of a batch for all."""
TEXT_PART_NAMES = {r"^language_model\.lm_head": "lm_head", r"^(model\.)?language_model\.(model\.)?": "model."}
"""Names that tensors of a text part have in files of whole models, and those that they have in a decoder of text."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def name_in_text_part(name: str) -> str:
    """Name in a decoder of text that a tensor of a whole model's file has."""
    for pattern, own in TEXT_PART_NAMES.items():
        name = re.sub(pattern, own, name)
    return name


def is_known(model_type: object) -> bool:
    """True if transformers has a decoder of this type."""
    return decoder_of(model_type) is not None


def decoder_of(model_type: object) -> str | None:
    """Class of transformers' decoder of a ``model_type``, None if it has none."""
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None


def has_other_parts(architecture: str) -> bool:
    """True if models of a class take images or sound too."""
    return architecture.endswith("ForConditionalGeneration")


def transformers_config(raw: dict[str, Any]) -> PreTrainedConfig:
    """The configuration as transformers has it; ``ModelError`` for what it cannot run with our attention."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not is_known(model_type):
        why = f"transformers has no decoder of model_type {shown(model_type)}"
        if raw.get("auto_map"):
            why += ", and code from a model's folder is never run (trust_remote_code)"
        raise ModelError(why)
    _check_architecture(raw.get("architectures"), model_type)
    fields = without_code({name: value for name, value in raw.items() if name != "quantization_config"})
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**fields)
    except Exception as error:  # transformers raises whatever its validators raise
        said = one_line(error).partition(". Errors: ")[0]  # which repeats the first for each type of a field
        raise ModelError(f"config.json does not describe a {model_type}: {said}") from error
    config = _without_other_parts(config)
    text = config.get_text_config(decoder=True)
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = {str(one["rope_type"]) for one in (ropes, *ropes.values()) if isinstance(one, dict) and "rope_type" in one}
    if unsupported := kinds - _ROPE_TYPES:
        raise ModelError(f"rope type {', '.join(sorted(unsupported))} is not supported through transformers")
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        activation = getattr(text, name, None)
        if isinstance(activation, str) and activation not in ACT2FN:
            raise ModelError(f"transformers has no {name} {shown(activation)}")
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        raise ModelError(f"num_hidden_layers should be at most {_MAX_LAYERS}, and is {layers}")
    types = set(getattr(text, "layer_types", None) or ()) - {*_LAYER_TYPES}
    if types:
        raise ModelError(f"layers of type {', '.join(sorted(types))} are not supported through transformers")
    return config


def _without_other_parts(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration without parts for images and sound, where that can be: with none of those that are optional,
    else that of the text part, to whose decoder transformers gives the whole model's weights.
    """
    parts = getattr(config, "sub_configs_defaults", {})
    optional = [name for name, spec in parts.items() if getattr(spec, "optional", False)]
    for name in optional:
        setattr(config, name, None)
    text = config.get_text_config(decoder=True)
    if optional or not is_known(text.model_type) or not has_other_parts(_architecture(config.model_type)):
        return config
    for name in ("tie_word_embeddings", "eos_token_id"):
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    if config.model_type == "gemma3":  # of which transformers caps logits of the text model alone
        text.final_logit_softcapping = None
    return text


def _architecture(model_type: str) -> str:
    """Class of the decoder of a ``model_type``."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _check_architecture(named: object, model_type: str) -> None:
    """Raise ``ModelError`` if ``architectures`` names another class than the decoder of this ``model_type``."""
    decoder = _architecture(model_type)
    if named and named not in (decoder, [decoder]):
        raise ModelError(f"transformers' decoder of model_type {model_type} is {decoder}, not {shown(named)}")


def fallback_config(path: Path, raw: dict[str, Any], dtype: torch.dtype, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of a model that transformers computes; ``path`` is config.json."""
    whole, quantization = transformers_config(raw), read_quantization(path.parent, raw)
    if quantization is not None and quantization.numbers is Numbers.MXFP4:
        raise ModelError("mxfp4 weights are not supported through transformers")
    config = whole.get_text_config(decoder=True)
    if whole.is_encoder_decoder or not getattr(config, "num_hidden_layers", None):
        raise ModelError(f"{path}: {whole.model_type} is no decoder alone")
    layers = int(config.num_hidden_layers)
    heads, kv_heads = getattr(config, "num_attention_heads", None), _largest(config, "num_key_value_heads", layers)
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(heads, int) or not isinstance(longest, int):
        raise ModelError(f"{path}: transformers' {config.model_type} does not say its heads and longest sequence")
    return ModelConfig(
        architecture=_architecture(raw["model_type"]),
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(_largest(config, "intermediate_size", layers) or 4 * config.hidden_size),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(kv_heads or heads),
        head_dim=int(_largest(config, "head_dim", layers) or config.hidden_size // heads),
        max_position=longest,
        rms_norm_eps=1e-6,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=bool(getattr(whole, "tie_word_embeddings", False)),
        sliding_windows=(None,) * layers,
        rope=RopeConfig("default", 10_000.0),
        eos_token_ids=eos_token_ids,
        bos_token_id=getattr(config, "bos_token_id", None),
        dtype=dtype,
        quantization=quantization,
        is_fallback=True,
    )


def _largest(config: PreTrainedConfig, name: str, num_layers: int) -> int | None:
    """Field of a configuration, of which some have one for each layer: the largest; None where it has none."""
    try:
        found: int | list[int] | None = getattr(config, name, None)
    except RuntimeError:  # of a field that differs between layers
        layers = (config.per_layer_config[layer] for layer in range(num_layers))
        return max(int(getattr(layer, name)) for layer in layers)
    return max(found) if isinstance(found, list) else found
