"""``quantization_config`` and tensors of published FP8 checkpoints: one layer's names, shapes and types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.model_executor.layers.quantization import Activations, Scales
from outrider.model_executor.models import read_model_config
from outrider.model_executor.models.weights import checkpoint_targets
from tests.model_executor.test_published_names import read_published

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_8B_FP8: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
FP8_DYNAMIC: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8,
                "observer": None, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "float",
            },
        },
    },
    "format": "float-quantized", "global_compression_ratio": None, "ignore": ["lm_head"], "kv_cache_scheme": None,
    "quant_method": "compressed-tensors", "quantization_status": "compressed",
}  # fmt: skip
MODEL_OPT: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}  # fmt: skip
NORMS = {
    "model.norm.weight": (4096,),
    "model.layers.0.input_layernorm.weight": (4096,),
    "model.layers.0.post_attention_layernorm.weight": (4096,),
    "model.layers.0.self_attn.q_norm.weight": (128,),
    "model.layers.0.self_attn.k_norm.weight": (128,),
    "model.embed_tokens.weight": (151_936, 4096),
    "lm_head.weight": (151_936, 4096),
}
MATRICES = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (12_288, 4096), "mlp.up_proj": (12_288, 4096),
    "mlp.down_proj": (4096, 12_288),
}  # fmt: skip


def by_blocks(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"weight_scale_inv": (rows // 128, columns // 128)}


def by_channels(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"weight_scale": (rows, 1)}


def by_tensors(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"weight_scale": (1,), "input_scale": (1,)}


@pytest.mark.parametrize(
    ("config", "scales", "weights", "activations"),
    [
        (QWEN3_8B_FP8, by_blocks, Scales.BLOCK, Activations.GROUP),
        (FP8_DYNAMIC, by_channels, Scales.CHANNEL, Activations.TOKEN),
        (MODEL_OPT, by_tensors, Scales.TENSOR, Activations.STATIC),
    ],
)
def test_a_published_checkpoint_has_what_is_asked_for(
    config: dict[str, Any], scales: Any, weights: Scales, activations: Activations, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, "quantization_config": config}))
    read = read_model_config(tmp_path)
    assert read.quantization is not None
    assert (read.quantization.weights, read.quantization.activations) == (weights, activations)
    assert read.quantization.has_fp8_cache == (config is MODEL_OPT)
    expected = dict(NORMS)
    for name, shape in MATRICES.items():
        expected[f"model.layers.0.{name}.weight"] = shape
        expected |= {f"model.layers.0.{name}.{kind}": size for kind, size in scales(*shape).items()}
    targets = checkpoint_targets(read)
    assert {name: target.shape for name, target in targets.items()} == expected
    fp8 = {name for name, target in targets.items() if "F8_E4M3" in target.file_types}
    assert fp8 == {f"model.layers.0.{name}.weight" for name in MATRICES}
    assert all("BF16" in targets[name].file_types for name in expected.keys() - fp8)
    assert read.dtype is torch.bfloat16


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model"])
def test_modules_of_a_text_part_are_found_by_their_published_names(prefix: str, tmp_path: Path) -> None:
    config = {**read_published("qwen3.5-27b", None)["config"]}
    config["quantization_config"] = {
        **QWEN3_8B_FP8,
        "modules_to_not_convert": [
            "lm_head", "model.visual", f"{prefix}.layers.0.linear_attn.in_proj_a",
            f"{prefix}.layers.0.linear_attn.in_proj_b", f"{prefix}.layers.1.linear_attn.in_proj_qkv",
            f"{prefix}.layers.1.linear_attn.in_proj_z", f"{prefix}.layers.3.self_attn.o_proj",
        ],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    targets = checkpoint_targets(read_model_config(tmp_path))
    scaled = {name.removesuffix(".weight_scale_inv") for name in targets if name.endswith(".weight_scale_inv")}
    first, second, last = (f"model.layers.{number}." for number in (0, 1, 3))
    assert {f"{first}linear_attn.{name}" for name in ("in_proj_q", "in_proj_v", "in_proj_z", "out_proj")} <= scaled
    assert not {f"{first}linear_attn.in_proj_a", f"{first}linear_attn.in_proj_b", f"{last}self_attn.o_proj"} & scaled
    assert not {f"{second}linear_attn.{name}" for name in ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z")} & scaled
    assert targets[f"{last}self_attn.q_proj.weight_scale_inv"].shape == (2 * 24 * 256 // 128, 5120 // 128)
