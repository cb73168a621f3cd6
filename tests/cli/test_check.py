"""``outrider check``: what a configuration without weights says, and why a model would not load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from tests.support.fp8_models import compressed

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_5_0_8B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_value_heads": 16, "linear_num_key_heads": 16, "max_position_embeddings": 262_144,
        "full_attention_interval": 4,
    },
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def checked(folder: Path, config: dict[str, Any], *flags: str) -> tuple[int, str]:
    (folder / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["check", str(folder), *flags])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        (
            {},
            (),
            (
                "native: LlamaForCausalLM",
                "bfloat16",
                "14.96 GiB",
                "13.98 GiB of weights a token: one user gets at most 223 on H100 or 320 on H200",
                "131,072 bytes a token",
                "16.00 GiB",
            ),
        ),
        ({}, ("--quantization", "fp8"), ("fp8 (online)", "8.46 GiB")),
        (
            {},
            ("-tp", "2", "--max-model-len", "8192"),
            ("7.48 GiB on each of 2 GPUs", "6.99 GiB of weights a token on each of 2 GPUs", "1.00 GiB", "8,192 tokens"),
        ),
        ({"quantization_config": BLOCKS}, (), ("128x128 blocks, activations by groups of 128", "8.46 GiB")),
    ],
)
def test_a_model_that_loads(
    changes: dict[str, Any], flags: tuple[str, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    code, printed = checked(tmp_path, {**LLAMA_8B, **changes}, *flags)
    assert code == 0, printed
    for part in said:
        assert part in printed


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        ({"architectures": ["CLIPModel"]}, (), "CLIPModel is not supported; supported are LlamaForCausalLM"),
        ({**LLAMA_8B, "quantization_config": {"quant_method": "awq"}}, (), "supported are FP8"),
        (
            {**LLAMA_8B, "quantization_config": compressed("channel", None, []) | {"format": "int-quantized"}},
            (),
            "format",
        ),
        (LLAMA_8B, ("-tp", "3"), "does not divide its 32 attention heads"),
        (LLAMA_8B, ("--max-model-len", "200000"), "must be from 1 to 131072"),
    ],
)
def test_a_model_that_does_not_load(config: dict[str, Any], flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, printed = checked(tmp_path, config, *flags)
    assert (code, said in printed) == (1, True), printed


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/b"}')
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "is an adapter of a/b, not a model: merge it into its base model" in " ".join(result.output.split())


def test_recurrent_layers_take_memory_for_each_sequence(tmp_path: Path) -> None:
    code, printed = checked(tmp_path, QWEN3_5_0_8B)
    assert code == 0, printed
    for part in (
        "native: Qwen3_5ForConditionalGeneration",
        "text; images",
        "12,288 bytes a token",
        "31.6 MiB a sequence",
    ):
        assert part in printed
