"""Tiny random models of what transformers computes for want of a family of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_models import cached_tiny_model

_SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 5, "sliding_window": 6,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 16, "vocab_size_per_layer_input": 272, "hidden_size_per_layer_input": 8, "pad_token_id": 0,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4_EXPERTS: dict[str, Any] = {
    **GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
}  # fmt: skip
_LATENT = {
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "head_dim": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_LATENT_EXPERTS = {**_LATENT, **_EXPERTS}
FALLBACK_CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere-norms": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 6},
    "cwm": {"sliding_window": 6, "bos_token_id": 1},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT_EXPERTS,
    "deepseek_v3": _LATENT_EXPERTS,
    "dots1": {**_EXPERTS, "head_dim": 8},
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 2},
    "falcon": {"head_dim": ...},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 272, "hidden_size_per_layer_input": 8,
        "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0], "pad_token_id": 0,
    },
    "gemma4": GEMMA4_EXPERTS,
    "gemma4_text": GEMMA4_EXPERTS,
    "glm4_moe_lite": _LATENT_EXPERTS,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 8,
        "mamba_d_head": 8,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1, "moe_intermediate_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mbart": {"d_model": 32, "decoder_layers": 2, "is_decoder": True, "is_encoder_decoder": False},
    "mimo_v2_flash": {"v_head_dim": 4, "swa_v_head_dim": 4},
    "minicpm3": {**_LATENT, "head_dim": ...},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": _SLIDING,
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "phimoe": {"num_local_experts": 4, "sliding_window": 256},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    },
    "roberta": {"is_decoder": True, "pad_token_id": 1},
    "solar_open": {**_EXPERTS, "head_dim": 8},
    "starcoder2": {"sliding_window": 6},
    "vaultgemma": _SLIDING,
}  # fmt: skip
"""Configurations by ``model_type``, which a name may follow; others have the fields that all tiny models have."""


def build_fallback(name: str, **config: Any) -> Path:
    """A tiny model by its ``model_type``; ``...`` leaves a field out."""
    return cached_tiny_model(name.partition("-")[0], **{**FALLBACK_CONFIGS.get(name, {}), **config})
