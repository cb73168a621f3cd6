"""``outrider check``: what a configuration without weights says, and why a model would not load."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.errors import ModelError
from outrider.model_executor.loader.description import describe_model
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.model_runner import ModelRunner
from tests.support.fp8_models import FORMATS, compressed, quantize_folder
from tests.support.tiny_models import cached_tiny_model

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
PER_CHANNEL = compressed("channel", {"strategy": "token", "dynamic": True}, ["lm_head"])
SPARSE = {**PER_CHANNEL, "sparsity_config": {"format": "sparse-24-bitmask"}}
TWO_WAYS: dict[str, Any] = {
    **PER_CHANNEL,
    "config_groups": {
        **PER_CHANNEL["config_groups"],
        "group_1": compressed("tensor", None, [])["config_groups"]["group_0"],
    },
}
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
                "reads 13.98 GiB a token: tokens/s of one user without drafts are below 223 on an H100, 320 on an H200",
                "131,072 bytes a token",
                "16.00 GiB",
            ),
        ),
        ({}, ("--quantization", "fp8"), ("fp8 (online)", "8.46 GiB")),
        (
            {},
            ("-tp", "2", "--max-model-len", "8192"),
            ("7.48 GiB on each of 2 GPUs", "reads 6.99 GiB a token on each of 2 GPUs", "1.00 GiB", "8,192 tokens"),
        ),
        ({}, ("-tp", "16"), ("262,144 bytes a token",)),  # each rank has one of the 8 key and value heads
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
        (
            {**LLAMA_8B, "quantization_config": TWO_WAYS},
            (),
            "config_groups group_0, group_1 are quantized in different",
        ),
        ({**LLAMA_8B, "quantization_config": {**TWO_WAYS, "config_groups": {}}}, (), "has no config_groups, which say"),
        ({**LLAMA_8B, "quantization_config": SPARSE}, (), "a sparsity_config, and sparse weights are not supported"),
        (LLAMA_8B, ("-tp", "3"), "does not divide its 32 attention heads"),
        (LLAMA_8B, ("--max-model-len", "200000"), "must be from 1 to 131072"),
    ],
)
def test_a_model_that_does_not_load(config: dict[str, Any], flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, printed = checked(tmp_path, config, *flags)
    assert (code, said in printed) == (1, True), printed


def spoil(folder: Path, name: str) -> None:
    """One tensor of an FP8 checkpoint less, or a tokenizer that is none."""
    if name == "tokenizer.json":
        (folder / name).write_text("{}")
        return
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (None, "fp8 (compressed-tensors): weights by channel"),
        ("model.layers.0.self_attn.q_proj.weight_scale", "q_proj.weight_scale is missing from the safetensors files"),
        ("tokenizer.json", "is not a tokenizer of the tokenizers library"),
    ],
)
def test_files_beside_the_configuration_are_checked_as_the_loader_does(
    spoilt: str | None, said: str, tmp_path: Path
) -> None:
    """Files of a model whose router is FP8, which they alone say."""
    form = replace(FORMATS["channel"], has_router=True)
    folder = quantize_folder(cached_tiny_model("qwen3_moe"), tmp_path / "fp8", form)
    if spoilt is not None:
        spoil(folder, spoilt)
    result = CliRunner().invoke(app, ["check", str(folder)])
    printed = " ".join(result.output.split())
    assert (result.exit_code, said in printed) == (int(spoilt is not None), True), printed
    if spoilt is None:
        ModelRunner.load(folder, num_pages=8)
        return
    with pytest.raises(ModelError, match=re.escape(said)):
        describe_model("target", folder, ModelRunner.load(folder, num_pages=8))


def test_experts_of_gpt_oss_are_never_fp8_numbers_alone(tmp_path: Path) -> None:
    """Quantizers of linear layers pass over them, since they are stacked, and do not say so."""
    source = cached_tiny_model("gpt_oss")
    fields = json.loads((source / "config.json").read_text())
    fields["quantization_config"] = compressed("channel", None, ["lm_head"])
    code, printed = checked(tmp_path, fields)
    assert code == 0, printed
    folder = quantize_folder(
        source, tmp_path / "fp8", replace(FORMATS["weights alone"], kept=("lm_head", "router", "experts"))
    )
    change = {**fields, "quantization_config": compressed("channel", None, ["lm_head"])}
    (folder / "config.json").write_text(json.dumps(change))
    ModelRunner.load(folder, num_pages=8)
    assert checked(folder, change) == (code, printed)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/b"}')
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "is an adapter of a/b, not a model: merge it into its base model" in " ".join(result.output.split())


@pytest.mark.parametrize("has_weights", [True, False])
def test_an_adapter_beside_a_model_is_refused(has_weights: bool, tmp_path: Path) -> None:
    """transformers would apply it."""
    folder = tmp_path / "model"
    shutil.copytree(cached_tiny_model(), folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/b"}')
    if not has_weights:
        (folder / "model.safetensors").unlink()
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(ModelError, match=r"adapter_config\.json is of an adapter of a/b, which is not served"):
            load(folder)


@pytest.mark.parametrize("model", ["llama", "smollm3"])
@pytest.mark.parametrize("num_missing", [1, 2])
def test_an_index_that_names_absent_files_is_refused(model: str, num_missing: int, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cached_tiny_model(model), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    parts = {f"model-0000{number}-of-00002.safetensors": list(tensors)[number - 1 :: 2] for number in (1, 2)}
    for file, names in list(parts.items())[num_missing:]:
        save_file({name: tensors[name] for name in names}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(ModelError, match=r"model-0000\d-of-00002\.safetensors is missing, and model\S* names it"):
            load(folder)


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
