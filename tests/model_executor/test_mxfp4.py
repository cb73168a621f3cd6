"""gpt-oss with MXFP4 experts: transformers' logits of the widened weights; names and shapes of what is published."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ModelError
from outrider.kernels.experts import Mxfp4Matrix
from outrider.kernels.experts.reference import widened_mxfp4
from outrider.model_executor.loader.checkpoint import read_checkpoint
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.models import read_model_config
from tests.model_executor.parity import TOLERANCE, build, random_ids
from tests.model_executor.test_fp8 import logits_of
from tests.support.mxfp4_models import QUANTIZATION, mxfp4_reference, quantize_folder, to_mxfp4

MODEL: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 3}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200_002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131_072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199_999,
    "quantization_config": QUANTIZATION, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201_088,
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, list[int]]] = {
    "input_layernorm.weight": ("BF16", [2880]),
    "post_attention_layernorm.weight": ("BF16", [2880]),
    "self_attn.sinks": ("BF16", [64]),
    "self_attn.q_proj.weight": ("BF16", [4096, 2880]),
    "self_attn.q_proj.bias": ("BF16", [4096]),
    "self_attn.k_proj.weight": ("BF16", [512, 2880]),
    "self_attn.k_proj.bias": ("BF16", [512]),
    "self_attn.v_proj.weight": ("BF16", [512, 2880]),
    "self_attn.v_proj.bias": ("BF16", [512]),
    "self_attn.o_proj.weight": ("BF16", [2880, 4096]),
    "self_attn.o_proj.bias": ("BF16", [2880]),
    "mlp.router.weight": ("BF16", [32, 2880]),
    "mlp.router.bias": ("BF16", [32]),
    "mlp.experts.gate_up_proj_blocks": ("U8", [32, 5760, 90, 16]),
    "mlp.experts.gate_up_proj_scales": ("U8", [32, 5760, 90]),
    "mlp.experts.gate_up_proj_bias": ("BF16", [32, 5760]),
    "mlp.experts.down_proj_blocks": ("U8", [32, 2880, 90, 16]),
    "mlp.experts.down_proj_scales": ("U8", [32, 2880, 90]),
    "mlp.experts.down_proj_bias": ("BF16", [32, 2880]),
}
"""Tensors of a layer of gpt-oss-20b."""
OTHERS: dict[str, tuple[str, list[int]]] = {
    "model.embed_tokens.weight": ("BF16", [201_088, 2880]),
    "model.norm.weight": ("BF16", [2880]),
    "lm_head.weight": ("BF16", [201_088, 2880]),
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_folder(build("gpt_oss", **MODEL), tmp_path_factory.mktemp("mxfp4") / "model")


@functools.cache
def reference(folder: Path) -> torch.nn.Module:
    return mxfp4_reference(build("gpt_oss", **MODEL), folder)


def test_logits_are_those_of_the_widened_weights(quantized: Path) -> None:
    ids = random_ids(40, seed=2)
    with torch.no_grad():
        expected = reference(quantized)(torch.tensor([ids])).logits[0]
    found = logits_of(quantized, ids).float()
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    # Negative control: rounding to four bits shows.
    unrounded = logits_of(build("gpt_oss", **MODEL), ids)
    assert (unrounded - expected).abs().max() > 0.05


def test_the_type_of_activations_is_that_of_the_published_weights(quantized: Path) -> None:
    assert read_model_config(quantized).dtype is torch.bfloat16


def test_every_number_and_scale_is_widened() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(8, 1)  # [8, 256] bytes: K is 512
    scales = torch.tensor([1, 100, 120, 126, 127, 128, 140, 250], dtype=torch.uint8)[:, None].expand(-1, 16)
    found = widened_mxfp4(Mxfp4Matrix(codes, scales.contiguous()), torch.float32)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    expected = [[values[code] for byte in range(256) for code in (byte & 15, byte >> 4)]]
    assert torch.equal(found, torch.tensor(expected) * torch.exp2(scales[:, :1].float() - 127))


def test_what_four_bits_hold_comes_back() -> None:
    values = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0]).repeat(4, 8) * 0.25
    blocks, scales = to_mxfp4(values)
    assert torch.equal(widened_mxfp4(Mxfp4Matrix(blocks.flatten(1), scales), torch.float32), values)


def write_headers(folder: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A checkpoint of these names, types and shapes: the file has no bytes on disk for its tensors."""
    header, end = {}, 0
    for name, (kind, shape) in tensors.items():
        start, end = end, end + (1 if kind == "U8" else 2) * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(content).to_bytes(8, "little") + content)
        stream.truncate(8 + len(content) + end)


def published(folder: Path, num_layers: int = 2) -> dict[str, tuple[str, list[int]]]:
    types = GPT_OSS_20B["layer_types"][:num_layers]
    config = {**GPT_OSS_20B, "num_hidden_layers": num_layers, "layer_types": types}
    (folder / "config.json").write_text(json.dumps(config))
    layers = {f"model.layers.{i}.{name}": entry for i in range(num_layers) for name, entry in PUBLISHED.items()}
    return {**layers, **OTHERS}


def test_a_published_checkpoint_has_what_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_headers(tmp_path, published(tmp_path))
    config = read_model_config(tmp_path)
    stored = read_checkpoint(tmp_path, config, warns=True)
    assert not caplog.messages  # nothing is left over
    assert stored["model.layers.1.mlp.experts.31.down_proj.blocks"].shape == (2880, 1440)
    assert (config.rope.rope_type, config.rope.truncate, config.max_position) == ("yarn", False, 131_072)
    assert config.sliding_windows == (128, None)
    assert str(config.quantization) == "mxfp4 (mxfp4): weights by 1x32 blocks, activations unchanged"


@pytest.mark.parametrize("name", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.down_proj_scales"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = published(tmp_path, 1)
    del tensors[f"model.layers.0.{name}"]
    write_headers(tmp_path, tensors)
    said = re.escape(name.replace("experts.down_proj_scales", "experts.0.down_proj.scales"))
    with pytest.raises(ModelError, match=said):
        read_checkpoint(tmp_path, read_model_config(tmp_path))


def test_an_estimate_counts_bytes_of_four_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    expected = sum(
        (1 if kind == "U8" else 4 if name.endswith("sinks") else 2) * math.prod(shape)
        for name, (kind, shape) in published(tmp_path, 24).items()
    )
    found = estimate_model(tmp_path)
    assert found.weight_bytes == expected
    assert 12.5 < found.weight_bytes / 2**30 < 13
    shared = estimate_model(tmp_path, tensor_parallel_size=8).weight_bytes
    assert expected < 8 * shared < 1.07 * expected  # of 90 groups of columns the last rank has 12


def test_other_families_have_no_such_experts(tmp_path: Path) -> None:
    folder = tmp_path
    config = json.loads((build("mixtral") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    with pytest.raises(ModelError, match="mxfp4 is supported for experts of gpt-oss, not for MixtralForCausalLM"):
        read_model_config(folder)


def test_sizes_are_whole_groups(tmp_path: Path) -> None:
    config = json.loads((build("gpt_oss") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    with pytest.raises(ModelError, match="has no whole groups of 32 columns"):
        estimate_model(tmp_path)


@pytest.mark.parametrize("form", ["dummy", "fp8"])
def test_weights_that_are_made(form: str, quantized: Path) -> None:
    """Noise of four bits whose sums stay of the inputs' size, and FP8 made of 16 and 32 bits."""
    ids = random_ids(20, seed=3)
    if form == "dummy":
        assert logits_of(quantized, ids, load_format="dummy").abs().max() < 100
    else:
        source = build("gpt_oss", **MODEL)
        exact, rounded = (logits_of(source, ids, quantization=name) for name in ("none", "fp8"))
        assert 0 < (exact - rounded).abs().max() < 1


def test_another_type_of_numbers_is_refused(quantized: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((quantized / "config.json").read_text())
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"gate_up_proj\.blocks is of type BF16; supported are U8"):
        read_checkpoint(tmp_path, read_model_config(tmp_path))
