"""Shapes that no published model has, but that its configuration allows: logits equal transformers'."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model_executor.parity import build, forward_and_check, open_scripted, poisoned_runner, random_ids

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 0.4, "beta_fast": 16, "beta_slow": 2,
}  # fmt: skip
GLM4_EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 3,
    "topk_group": 2, "use_qk_norm": True, "first_k_dense_replace": 1, "head_dim": 16,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"head_dim": 80, "num_key_value_heads": 1}),
    ("llama", {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 20}),
    ("qwen3", {"head_dim": 256, "num_key_value_heads": 1, "rope_parameters": YARN, "attention_bias": True}),
    ("mistral", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 96}),
    ("qwen2", {"tie_word_embeddings": True, "vocab_size": 301, "use_sliding_window": True, "sliding_window": 5}),
    ("qwen3_moe", {"num_experts": 7, "num_experts_per_tok": 7, "mlp_only_layers": [0]}),
    ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("gpt_oss", {"tie_word_embeddings": True, "vocab_size": 301, "num_key_value_heads": 1, "attention_bias": False}),
    (
        "gemma3_text",
        {
            "sliding_window": 6,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    ("glm4_moe", GLM4_EXPERTS),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 3, "linear_num_value_heads": 6, "num_key_value_heads": 1}),
    ("qwen3_next", {"decoder_sparse_step": 2, "norm_topk_prob": False, "head_dim": 80}),
]


@pytest.mark.integration
@pytest.mark.parametrize(("architecture", "config"), CASES, ids=str)
def test_ragged_forwards_give_the_reference_logits(architecture: str, config: dict[str, Any]) -> None:
    folder, vocab = build(architecture, **config), config.get("vocab_size", 272)
    runner = poisoned_runner(folder, page_size=3, scattered=True)
    assert not runner.config.is_fallback
    first, second = (open_scripted(runner, folder, 60) for _ in range(2))
    text, other = (random_ids(60, seed=seed, vocab_size=vocab) for seed in (1, 2))
    forward_and_check(runner, (first, text[:20], None))
    forward_and_check(runner, (first, text[20:26], None), (second, other[:11], 1))
    forward_and_check(runner, (second, other[11:30], None), (first, other[:1], 1))
