"""Architectures of models that are served, by name, and the layers that EAGLE-3 heads read. Needs no torch: the command
line checks folders with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "MixtralForCausalLM",
    "GptOssForCausalLM",
    "MiMoForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "GraniteForCausalLM",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "Phi3ForCausalLM",
)
"""Names in ``architectures`` of config.json."""


def eagle3_field(config: Mapping[str, Any], name: str) -> object:
    """A field of EAGLE-3's own in a head's ``config.json``, which stands beside the layer's or in ``eagle_config``."""
    nested, found = config.get("eagle_config"), config.get(name)
    return nested.get(name) if found is None and isinstance(nested, Mapping) else found


def eagle3_layers(config: Mapping[str, Any], num_target_layers: int) -> object:
    """Layers that a head's ``config.json`` names, unchecked, else the ones that EAGLE-3 was published with: an early, a
    middle and a late one.
    """
    named = eagle3_field(config, "eagle_aux_hidden_state_layer_ids")
    return [2, num_target_layers // 2, num_target_layers - 3] if named is None else named
