"""Logits equal transformers' on the same weights: every architecture and rope variant, in every shape a forward can
have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import (
    TOLERANCE,
    build,
    forward_and_check,
    open_scripted,
    poisoned_runner,
    random_ids,
    reference,
    reference_logits,
)
from tests.support.fallback_models import GEMMA4, GEMMA4_EXPERTS


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


SCALED_ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": rope("linear", factor=4.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "yarn-attention-factor": rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.7),
    "yarn-mscale": rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        mscale=0.5,
        mscale_all_dim=1.5,
        beta_fast=8,
        beta_slow=2,
    ),
    "yarn-original-beside": {**rope("yarn", factor=4.0), "original_max_position_embeddings": 64},
    "yarn-original-twice": {
        **rope("yarn", factor=4.0, original_max_position_embeddings=16),
        "original_max_position_embeddings": 64,
    },
    "llama3-original-beside": {
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        "original_max_position_embeddings": 64,
    },
    "yarn-not-truncated": rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
}
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    },
}
KEYS_AS_VALUES: dict[str, Any] = {
    **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
}  # fmt: skip
MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 1]},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
GLM_4_5: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "num_hidden_layers": 3, "routed_scaling_factor": 1.5, "attention_bias": True, "head_dim": 8,
}  # fmt: skip
NOT_READ = {"norm_topk_prob": False, "sliding_window": 5, "hidden_activation": "gelu_pytorch_tanh"}
"""Fields that some families have no use for."""
PHI_4_MINI: dict[str, Any] = {
    "tie_word_embeddings": True, "hidden_size": 64, "head_dim": 16, "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 120,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 120,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 5.0, 7.0, 9.0],
    },
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-ungrouped": ("llama", {"num_key_value_heads": 4}),
    "llama-packed-size": ("llama", {"hidden_size": 192, "intermediate_size": 1400, "head_dim": 48}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding-layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "moe_intermediate_size": 24}),
    "qwen3-moe-mlp-layers": (
        "qwen3_moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "olmoe": ("olmoe", {}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 6}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 3}),
    "gpt-oss-plain": (
        "gpt_oss",
        {
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention"],
            "num_experts_per_tok": 5,
            "swiglu_alpha": 0.8,
            "swiglu_limit": 0.3,
        },
    ),
    "gemma3": ("gemma3_text", {**GEMMA, "final_logit_softcapping": 3.0}),
    "gemma3-text-part": ("gemma3", {**GEMMA, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-keys-as-values": ("gemma4_text", KEYS_AS_VALUES),
    "gemma4-text-part": (
        "gemma4",
        {**GEMMA4, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_activation": "silu"},
    ),
    "gemma4-experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4-experts-text-part": ("gemma4", {**GEMMA4_EXPERTS, **KEYS_AS_VALUES}),
    "gemma4-unified": ("gemma4_unified_text", KEYS_AS_VALUES),
    "gemma4-unified-text-part": ("gemma4_unified", KEYS_AS_VALUES),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "glm4-a-quarter": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.25}),
    "glm4-moe": ("glm4_moe", {**GLM_4_5, "use_qk_norm": True}),
    "glm4-moe-groups": (
        "glm4_moe",
        {
            **GLM_4_5,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral-small": ("mistral3", {}),
    "qwen2.5-vl-text-part": ("qwen2_5_vl", {**MROPE, "head_dim": ...}),
    "qwen3-vl-text-part": ("qwen3_vl", MROPE),
    "qwen3-vl-moe-text-part": ("qwen3_vl_moe", {**MROPE, **NOT_READ}),
    "olmo2": ("olmo2", {}),
    "olmo2-one-kv-head": ("olmo2", {"num_key_value_heads": 1}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "truncate": False,
                },
            },
        },
    ),
    "qwen3.5": ("qwen3_5", {**NOT_READ, "num_experts": 4}),
    "qwen3.5-text": ("qwen3_5_text", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3.5-moe": ("qwen3_5_moe", {}),
    "qwen3.5-moe-text": ("qwen3_5_moe_text", {"linear_conv_kernel_dim": 3, **NOT_READ}),
    "qwen3-next": ("qwen3_next", {"norm_topk_prob": True}),
    "qwen3-next-mlp-layers": (
        "qwen3_next",
        {"mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_value_heads": 6, "partial_rotary_factor": 0.5},
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 7}),
    "phi4-mini": ("phi3", PHI_4_MINI),
    **{f"llama-{name}": ("llama", parameters) for name, parameters in SCALED_ROPES.items()},
    "qwen2-yarn": ("qwen2", SCALED_ROPES["yarn"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_shape_of_forward_gives_the_reference_logits(name: str) -> None:
    """Prefill, chunks, decode, scoring, rollback and fork, all mixed in ragged batches, over scattered pages."""
    architecture, config = MODELS[name]
    folder = build(architecture, **config)
    runner = poisoned_runner(folder, page_size=3, scattered=True)
    assert estimate_model(folder).kv_bytes_per_token == runner.kv_cache.layout.bytes_per_token(4)
    first, second, third = (open_scripted(runner, folder, 90) for _ in range(3))
    text, other = random_ids(90, seed=1), random_ids(90, seed=2)

    forward_and_check(runner, (first, text[:20], None))  # prefill
    forward_and_check(runner, (first, text[20:21], None))  # decode
    forward_and_check(runner, (first, text[21:26], None), (second, other[:11], 1))  # scoring beside a prefill chunk
    forward_and_check(runner, (second, other[11:30], 0), (first, text[26:27], 1), (third, [7], 1))
    runner.sequences.truncate(first.sequence, 22)  # rollback into the middle of a page
    forward_and_check(runner, (third, text[:4], None), (first, other[:5], None), (second, other[30:31], None))
    forked = open_scripted(runner, folder, 1)
    runner.sequences.release(forked.sequence)
    forked.sequence = runner.sequences.fork(second.sequence, 60)
    forward_and_check(runner, (second, text[:6], None), (forked, text[50:54], None), (first, text[60:61], None))
    runner.sequences.truncate(second.sequence, 13)  # into a page that the fork still holds
    forward_and_check(runner, (second, text[70:75], None))
    forward_and_check(runner, (forked, text[54:60], None))
    runner.sequences.release(forked.sequence)
    forward_and_check(runner, (second, text[75:80], 2), (first, text[80:84], None))


@pytest.mark.parametrize("name", [*SCALED_ROPES])
def test_the_reference_tells_rope_variants_apart(name: str) -> None:
    """Else the parity of scaled variants would prove nothing."""
    text = random_ids(60, seed=3)
    plain = reference_logits(build("llama"), text)
    assert (plain - reference_logits(build("llama", **SCALED_ROPES[name]), text)).abs().max() > 0.01


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_page_sizes(page_size: int, scattered: bool) -> None:
    folder = build("qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=1)
    runner = poisoned_runner(folder, page_size=page_size, scattered=scattered)
    first, second = (open_scripted(runner, folder, 130) for _ in range(2))
    text = random_ids(130, seed=4)
    forward_and_check(runner, (first, text[:64], None), (second, text[:1], None))
    forward_and_check(runner, (first, text[64:129], 3), (second, text[1:17], None))
    runner.sequences.truncate(first.sequence, 63)
    forward_and_check(runner, (first, text[:5], None), (second, text[20:36], None))


def test_chunked_prefill_of_any_chunk_length_gives_the_same_logits() -> None:
    folder = build("mistral", sliding_window=7)
    runner = poisoned_runner(folder, page_size=4)
    text = random_ids(40, seed=5)
    for chunk in (1, 2, 5, 7, 8, 13, 39):
        scripted = open_scripted(runner, folder, 40)
        for start in range(0, 40, chunk):
            forward_and_check(runner, (scripted, text[start : start + chunk], None))
        runner.sequences.release(scripted.sequence)


def test_a_batch_of_sixteen_mixed_rows() -> None:
    folder = build("llama")
    runner = poisoned_runner(folder, page_size=16)
    rows = [open_scripted(runner, folder, 60) for _ in range(16)]
    texts = [random_ids(60, seed=10 + index) for index in range(16)]
    forward_and_check(
        runner, *[(row, text[: 1 + index * 3], 1) for index, (row, text) in enumerate(zip(rows, texts, strict=True))]
    )
    forward_and_check(
        runner,
        *[(row, text[50 : 51 + index % 9], None) for index, (row, text) in enumerate(zip(rows, texts, strict=True))],
    )
    assert runner.num_forwards == 2


def test_forks_of_forks_keep_their_own_texts() -> None:
    folder = build("llama")
    runner = poisoned_runner(folder, page_size=4)
    root = open_scripted(runner, folder, 40)
    text = random_ids(40, seed=6)
    forward_and_check(runner, (root, text[:10], 1))
    branches = [root]
    for _ in range(3):
        sequence = runner.sequences.fork(branches[-1].sequence, 40)
        branches.append(type(root)(runner, folder, sequence))
    rows = [(branch, text[10 + index : 15 + index], None) for index, branch in enumerate(branches)]
    forward_and_check(runner, *rows)
    runner.sequences.release(root.sequence)
    forward_and_check(runner, *[(branch, [3, 4], None) for branch in branches[1:]])


def test_dynamic_rope_equals_the_reference_that_decodes_token_by_token() -> None:
    """Past the trained length transformers' angles depend on how the text was cut; ours are those of its decoding."""
    folder = build("llama", max_position_embeddings=32, **rope("dynamic", factor=4.0))
    text = random_ids(60, seed=7)
    expected = []
    with torch.no_grad():
        output = reference(folder)(torch.tensor([text[:32]]), use_cache=True)
        expected.append(output.logits[0])
        for token_id in text[32:]:
            output = reference(folder)(torch.tensor([[token_id]]), past_key_values=output.past_key_values)
            expected.append(output.logits[0])
    runner = poisoned_runner(folder, page_size=3)
    assert runner.max_model_len == 128
    sequence = runner.sequences.open(60)
    whole = runner.forward([ForwardRow(sequence, text, 60)])
    torch.testing.assert_close(whole.clone(), torch.cat(expected), atol=TOLERANCE, rtol=0)


def test_longrope_has_one_set_of_factors_for_all_lengths() -> None:
    """Short ones up to the trained length, which is the default; long ones where longer sequences are asked for."""
    folder, text = build("phi3", **PHI_4_MINI), random_ids(150, seed=8)
    assert poisoned_runner(folder, page_size=4).max_model_len == 120
    runner = ModelRunner.load(folder, page_size=4, num_pages=100, max_model_len=200)
    sequence = runner.sequences.open(150)
    parts = [runner.forward([ForwardRow(sequence, part, len(part))]).clone() for part in (text[:70], text[70:])]
    torch.testing.assert_close(torch.cat(parts), reference_logits(folder, text), atol=TOLERANCE, rtol=0)


def test_only_the_wanted_logits_come_back() -> None:
    folder = build("llama")
    runner = poisoned_runner(folder, page_size=16)
    scripted = open_scripted(runner, folder, 20)
    assert runner.forward([scripted.row([1, 2, 3], 0)]).shape == (0, 272)
    assert runner.forward([scripted.row([1, 2, 3], 2)]).shape == (2, 272)
    assert runner.forward([]).shape == (0, 272)
    assert scripted.sequence.length == 6
