"""Configuration of a model from the JSON files of its folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from outrider.errors import ModelError
from outrider.model_executor.models import read_model_config
from tests.support.tiny_models import EOS_TOKEN, build_tiny_model, cached_tiny_model


def write_config(folder: Path, **fields: object) -> Path:
    """A published config.json; those of an older transformers have rope_theta and rope_scaling, not rope_parameters."""
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps({**base, **fields}))
    return folder


def test_an_older_config_is_understood(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    config = read_model_config(write_config(tmp_path, rope_theta=500000.0, rope_scaling=scaling))
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == ("llama3", 500000.0, 8.0)
    assert config.rope.original_max_position == 128
    assert (config.head_dim, config.dtype, config.max_position) == (8, torch.bfloat16, 512)


@pytest.mark.parametrize(
    ("scaling", "max_position"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_the_longest_sequence_counts_the_scaling(
    tmp_path: Path, scaling: dict[str, object] | None, max_position: int
) -> None:
    assert read_model_config(write_config(tmp_path, rope_scaling=scaling)).max_position == max_position


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_the_trained_length_beside_the_scaling_has_priority(tmp_path: Path, rope_type: str) -> None:
    scaling: dict[str, object] = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 128}
    if rope_type == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = read_model_config(write_config(tmp_path, rope_scaling=scaling, original_max_position_embeddings=256))
    assert config.rope.original_max_position == 256
    assert config.max_position == (1024 if rope_type == "yarn" else 512)


def test_a_part_of_the_heads_to_turn_is_refused_beside_the_scaling_too(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        read_model_config(write_config(tmp_path, partial_rotary_factor=0.5))


def test_every_end_token_of_the_generation_config_counts(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_model_config(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 10000000]}')
    assert read_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_model_config(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("architecture", "model_type", "other"),
    [
        ("LlamaForCausalLM", "mistral", "MistralForCausalLM"),
        ("MistralForCausalLM", "llama", "LlamaForCausalLM"),
        ("Olmo2ForCausalLM", "llama", "LlamaForCausalLM"),
    ],
)
def test_the_type_of_another_model_is_refused(architecture: str, model_type: str, other: str, tmp_path: Path) -> None:
    """Windows, scales and norms of the two differ, and their tensors do not."""
    write_config(tmp_path, architectures=[architecture], model_type=model_type)
    with pytest.raises(ModelError, match=f"names {architecture}, and model_type '{model_type}' is that of {other}: "):
        read_model_config(tmp_path)


def test_convolutions_of_recurrent_layers_have_one_activation(tmp_path: Path) -> None:
    hybrid = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 16}
    types = ["linear_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="hidden_act 'gelu_pytorch_tanh' is not supported with linear_attention"):
        read_model_config(write_config(tmp_path, **hybrid, layer_types=types, hidden_act="gelu_pytorch_tanh"))


def test_sliding_windows_are_read_layer_by_layer(tmp_path: Path) -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 5}
    assert read_model_config(write_config(tmp_path, **qwen2)).sliding_windows == (None, None, None)
    used = read_model_config(write_config(tmp_path, **qwen2, use_sliding_window=True, max_window_layers=1))
    assert (used.sliding_windows, used.sliding_window) == ((None, 5, 5), 5)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 6}
    assert read_model_config(write_config(tmp_path, **mistral)).sliding_windows == (6, 6, 6)
    layer_types = ["full_attention", "sliding_attention", "full_attention"]
    named = read_model_config(write_config(tmp_path, **mistral, layer_types=layer_types))
    assert named.sliding_windows == (None, 6, None), "as transformers' Ministral has it"
    with pytest.raises(ModelError, match="has sliding_attention, and sliding_window is not set or not used"):
        read_model_config(write_config(tmp_path, **qwen2, layer_types=layer_types))


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": []},
        {"architectures": None},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ["LLaMAForCausalLM"]},
        {"architectures": ["LlamaForCausalLM", "Other"]},
        {"model_type": None},
        {"hidden_act": "swish"},
        {"torch_dtype": "torch.bfloat16"},
        {"torch_dtype": "bf16"},
        {"torch_dtype": "auto", "dtype": "bfloat16"},
        {"auto_map": {"AutoConfig": "configuration.Config"}},
    ],
    ids=str,
)
def test_other_spellings_of_published_files_mean_the_same(tmp_path: Path, fields: dict[str, Any]) -> None:
    expected = read_model_config(write_config(tmp_path))
    assert expected.dtype == torch.bfloat16
    assert read_model_config(write_config(tmp_path, **fields)) == expected


def test_lists_of_ids_in_generation_config_are_taken(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"bos_token_id": [1], "pad_token_id": [0, 1], "eos_token_id": [7]}'
    )
    assert read_model_config(tmp_path).eos_token_ids == (7,)


def test_biases_are_where_each_architecture_has_them(tmp_path: Path) -> None:
    qwen2 = read_model_config(write_config(tmp_path, architectures=["Qwen2ForCausalLM"], model_type="qwen2"))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    llama = read_model_config(write_config(tmp_path, attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    qwen3 = read_model_config(write_config(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3"))
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)


@pytest.mark.parametrize("vocab_size", [8, 272])
def test_tiny_models_have_a_tokenizer_that_fits(tmp_path: Path, vocab_size: int) -> None:
    folder = build_tiny_model(tmp_path, vocab_size=vocab_size)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = read_model_config(folder)
    assert tokenizer.get_vocab_size() <= vocab_size
    assert config.eos_token_ids == (tokenizer.token_to_id(EOS_TOKEN),)
    text = "def f(n):\n    return 'é'" if vocab_size > 256 else "!$#"
    token_ids = tokenizer.encode(text).ids
    assert max(token_ids) < vocab_size
    assert tokenizer.decode(token_ids) == text


def test_tiny_models_repeat_and_differ_by_seed(tmp_path: Path) -> None:
    bytes_of = [
        (build_tiny_model(tmp_path / str(index), seed=seed) / "model.safetensors").read_bytes()
        for index, seed in enumerate((1, 1, 2))
    ]
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]
    assert cached_tiny_model(seed=1) == cached_tiny_model(seed=1) != cached_tiny_model(seed=2)


def test_reading_a_model_folder_does_not_import_the_compiler() -> None:
    """The compiler takes half of the time of a start, and reading all files of transformers a second time a tenth. Code
    that needs transformers' activations still gets the real ones.
    """
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from outrider.model_executor.models.config_reader import read_model_config\n"
        "from outrider.model_executor.models.weights import checkpoint_targets\n"
        "checkpoint_targets(read_model_config(Path(sys.argv[1])))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert not sys.modules['transformers.models'].__all__, 'its files were read for their names'\n"
        "from transformers.activations import ACT2FN\n"
        "assert 'silu' in ACT2FN"
    )
    subprocess.run([sys.executable, "-c", code, str(cached_tiny_model("llama"))], check=True)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("global_head_dim", -8, "global_head_dim should be greater than or equal to 1"),
        ("global_head_dim", 7, "global_head_dim should be a multiple of 2"),
        ("num_global_key_value_heads", 3, "num_global_key_value_heads should divide num_attention_heads 8"),
        ("enable_moe_block", True, "enable_moe_block without num_experts"),
        ("num_kv_shared_layers", -1, "num_kv_shared_layers should be greater than or equal to 0"),
        ("hidden_size_per_layer_input", -4, "hidden_size_per_layer_input should be greater than or equal to 0"),
        ("per_layer_config", {"1": {"head_dim": -8}}, "head_dim -8 of layer 1 should be positive and even"),
        ("per_layer_config", {"1": {"num_key_value_heads": 3}}, "num_key_value_heads 3 of layer 1 should divide"),
    ],
)
def test_sizes_of_gemma_4s_layers_are_checked(tmp_path: Path, field: str, value: Any, problem: str) -> None:
    given: dict[str, Any] = {
        **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "attention_k_eq_v": True},
        **{"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "hidden_size_per_layer_input": 0},
        "num_kv_shared_layers": 0,
    }
    assert read_model_config(write_config(tmp_path, **given)).layer_sizes
    with pytest.raises(ModelError, match=problem):
        read_model_config(write_config(tmp_path, **{**given, field: value}))
