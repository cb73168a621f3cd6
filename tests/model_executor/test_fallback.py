"""Models that transformers computes over our paged cache: logits equal its own, or a reason is given."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.loader.model import ModelImplementation, QuantizationName
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import read_model_config
from outrider.model_executor.models.support import FALLBACKS
from outrider.model_executor.row_batch import RowBatch
from outrider.types import LAST_HIDDEN_STATE
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
from tests.model_executor.test_loading import change_tensors, shard
from tests.support.fallback_models import FALLBACK_CONFIGS, build_fallback
from tests.support.fp8_models import FORMATS, FP8, compressed, fp8_reference, quantize_folder

ROOT = Path(__file__).parents[2]
SERVED = [one.model_type for one in FALLBACKS if not one.refused]
REFUSED = {one.model_type: one.refused for one in FALLBACKS if one.refused}
NEEDS_WEIGHTS = {"dbrx", "gemma3n_text", "jetmoe"}
"""Models whose code does not run without numbers, so that an estimate does not know their cache."""
QUICK = {"smollm3", "cohere2", "stablelm", "gemma4_text", "gpt2"}
"""The others are whole-model comparisons of the second tier."""


def cases(names: list[str]) -> list[Any]:
    return [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.integration]) for one in names]


NATIVE = ("gemma4_text", "gpt_oss")
"""Native families that share keys between layers or have learned sinks."""


@pytest.mark.parametrize("name", cases([*SERVED, *NATIVE, *(name for name in FALLBACK_CONFIGS if "-" in name)]))
def test_ragged_forwards_give_the_reference_logits(name: str) -> None:
    """Chunks, scoring, rollback and other texts beside, over scattered pages; the estimate has the same cache."""
    folder = build_fallback(name)
    forced: dict[str, Any] = {"model_impl": "transformers"} if name in NATIVE else {}
    runner = poisoned_runner(folder, page_size=3, scattered=True, **forced)
    assert runner.config.is_fallback
    first, second = (open_scripted(runner, folder, 60) for _ in range(2))
    text, other = random_ids(60, seed=1), random_ids(60, seed=2)
    forward_and_check(runner, (first, text[:20], None))
    forward_and_check(runner, (first, text[20:26], None), (second, other[:11], 1))
    runner.sequences.truncate(first.sequence, 22)
    forward_and_check(runner, (second, other[11:30], None), (first, other[:1], 1))
    known = None if name in NEEDS_WEIGHTS else runner.kv_cache.layout.bytes_per_token(4)
    assert estimate_model(folder, **forced).kv_bytes_per_token == known


@pytest.mark.parametrize("name", cases(list(REFUSED)))
def test_what_cannot_be_computed_so_is_refused_by_the_configuration_alone(name: str) -> None:
    folder = build_fallback(name)
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(ModelError, match=re.escape(REFUSED[name])):
            load(folder)


@pytest.mark.parametrize(
    "name", ["smollm3", *(pytest.param(n, marks=pytest.mark.integration) for n in ("gpt2", "opt"))]
)
def test_states_of_layers_are_those_of_transformers(name: str) -> None:
    """Layer i is what layer i reads; the last one before the norm, which transformers does not hand out."""
    folder, text = build_fallback(name), random_ids(20, seed=4)
    runner = ModelRunner.load(folder, dtype="float32", num_pages=20)
    layers = (1, 0, LAST_HIDDEN_STATE, 2)
    sequence = runner.sequences.open(20)
    _, states = runner.forward_batch(RowBatch.of([ForwardRow(sequence, text, 1)]), layers)
    with torch.no_grad():
        expected = reference(folder)(torch.tensor([text]), output_hidden_states=True).hidden_states
    first, embedding, last, unnormed = states.view(20, 4, 32).unbind(1)
    for found, wanted in ((first, expected[1]), (embedding, expected[0]), (last, expected[-1])):
        torch.testing.assert_close(found.clone(), wanted[0], atol=TOLERANCE, rtol=0)
    assert (unnormed - last).abs().max() > 0.01


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize(
    ("architecture", "config"), [("qwen3", {}), ("gemma3", {"final_logit_softcapping": 3.0})], ids=str
)
def test_a_native_family_can_be_run_through_transformers(
    architecture: str, config: dict[str, Any], implementation: ModelImplementation
) -> None:
    """The logits of a Gemma 3 with images are not capped."""
    folder, text = build(architecture, **config), random_ids(20, seed=3)
    runner = ModelRunner.load(folder, dtype="float32", num_pages=20, model_impl=implementation)
    assert runner.config.is_fallback is (implementation == "transformers")
    forward_and_check(runner, (open_scripted(runner, folder, 20), text, None))


@pytest.mark.parametrize("architecture", ["gemma2", "llama", "mixtral"])
def test_a_token_reads_the_same_bytes_whose_code_reads_them(architecture: str) -> None:
    """Embeddings that are looked up, and experts that are not chosen, do not count."""
    native, fallback = (estimate_model(build(architecture), model_impl=code) for code in ("native", "transformers"))
    assert fallback.decoding_bytes == native.decoding_bytes
    assert (native.weight_bytes == native.decoding_bytes) is native.config.tied_embeddings


@pytest.mark.parametrize(
    ("architecture", "config"), [("llama", {"hidden_act": "gelu"}), ("olmoe", {"clip_qkv": 0.5})], ids=str
)
def test_what_a_native_family_has_no_layer_for_runs_through_transformers(
    architecture: str, config: dict[str, Any]
) -> None:
    folder, text = build(architecture, **config), random_ids(20, seed=3)
    runner = ModelRunner.load(folder, dtype="float32", num_pages=20)
    assert runner.config.is_fallback
    forward_and_check(runner, (open_scripted(runner, folder, 20), text, None))
    with pytest.raises(ModelError, match=f"{next(iter(config))}.* is not supported"):
        ModelRunner.load(folder, num_pages=20, model_impl="native")


def test_fp8_made_at_load_equals_the_native_one() -> None:
    """The same weights and rounding, whoever computes the layers."""
    folder, text = build("qwen3"), random_ids(20, seed=3)
    found = []
    for implementation in ("native", "transformers"):
        runner = ModelRunner.load(folder, dtype="float32", num_pages=20, model_impl=implementation, quantization="fp8")
        sequence = runner.sequences.open(20)
        found.append(runner.forward([ForwardRow(sequence, text, 20)]).clone())
    torch.testing.assert_close(found[1], found[0], atol=TOLERANCE, rtol=0)
    with torch.no_grad():
        unquantized = reference(folder)(torch.tensor([text])).logits[0]
    assert (found[1] - unquantized).abs().max() > 0.01
    tensors = load_file(build("smollm3") / "model.safetensors")
    linear = sum(tensor.numel() for name, tensor in tensors.items() if "_proj" in name)
    every = sum(tensor.numel() for tensor in tensors.values())
    assert estimate_model(build("smollm3"), quantization="fp8").weight_bytes == linear + 4 * (every - linear)


def test_types_that_only_transformers_knows_should_fit_the_native_family(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build("llama"), tmp_path / "model"))
    change_config(folder, model_type="iquestcoder")
    assert read_model_config(folder).architecture == "LlamaForCausalLM"
    change_config(folder, model_type="gemma")
    with pytest.raises(ModelError, match="names LlamaForCausalLM, and model_type 'gemma' is that of GemmaForCausalLM"):
        read_model_config(folder)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_loading_reports_its_progress_and_shows_no_bars(
    quantization: QuantizationName, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else a service that loads for minutes is taken for one that hangs."""
    signs: list[tuple[int, int]] = []
    ModelRunner.load(
        build("smollm3"), num_pages=20, quantization=quantization, progress=lambda *sign: signs.append(sign)
    )
    num_bytes = estimate_model(build("smollm3"), quantization=quantization).weight_bytes
    assert len(signs) > 20
    assert {total for _, total in signs} == {num_bytes}
    assert signs[-1] == (num_bytes, num_bytes)
    assert "%|" not in capfd.readouterr().err


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "channel and head"])
def test_fp8_files_give_the_logits_of_their_widened_weights(form: str, tmp_path: Path) -> None:
    """Linear layers that read one tensor are one product; in float64, as for native families."""
    source = build("arcee", hidden_size=64, intermediate_size=80)
    folder, text = quantize_folder(source, tmp_path / "fp8", FORMATS[form]), random_ids(24, seed=3)
    with torch.no_grad():
        expected = fp8_reference(source, folder, FORMATS[form])(torch.tensor([text])).logits[0].float()
    runner = ModelRunner.load(folder, dtype="float64", num_pages=64)
    assert runner.config.is_fallback
    sequence = runner.sequences.open(24)
    found = [runner.forward([ForwardRow(sequence, part, len(part))]).clone() for part in (text[:7], text[7:])]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=0)
    quantized = sum(
        tensor.dtype == FP8 and tensor.numel() for tensor in load_file(folder / "model.safetensors").values()
    )
    assert estimate_model(source).weight_bytes - estimate_model(folder).weight_bytes == 3 * quantized


def test_an_fp8_head_is_refused_by_the_headers(tmp_path: Path) -> None:
    folder = quantize_folder(build_fallback("smollm3"), tmp_path / "fp8", FORMATS["channel and head"])
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(ModelError, match=r"tensor lm_head\.weight is FP8, and through transformers only"):
            load(folder)


def test_fp8_experts_are_refused_by_the_configuration_alone(tmp_path: Path) -> None:
    folder = quantize_folder(build_fallback("qwen2_moe"), tmp_path / "fp8", FORMATS["channel"])
    for load in (functools.partial(estimate_model, reads_headers=False), ModelRunner.load):
        with pytest.raises(
            ModelError, match=r"says that model\.layers\.\S+experts are FP8, which through transformers"
        ):
            load(folder)


def test_fp8_files_without_their_format_or_scales_are_refused(tmp_path: Path) -> None:
    form = FORMATS["tensor, static"]
    folder = quantize_folder(build("smollm3"), tmp_path / "fp8", form)
    name = "model.layers.1.self_attn.v_proj.input_scale"
    scale = load_file(folder / "model.safetensors")[name]
    change_tensors(folder, lambda tensors: tensors.update({name: -scale}))
    with pytest.raises(ModelError, match=f"{name} should have positive scales, and has -0"):
        ModelRunner.load(folder)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"tensor {name} of an FP8 layer is missing"):
        estimate_model(folder)
    change_config(folder, quantization_config=None)
    with pytest.raises(ModelError, match="is FP8, and through transformers only linear layers can be that config"):
        estimate_model(folder)


@pytest.mark.parametrize("name", ["afmoe", "hunyuan_v1_moe", "qwen2_moe"])
def test_routers_do_not_become_fp8(name: str) -> None:
    folder = build_fallback(name)
    tensors = load_file(folder / "model.safetensors").items()
    linear = sum(
        tensor.numel() for key, tensor in tensors if tensor.dim() == 2 and "_proj" in key and ".experts." not in key
    )
    whole, rounded = (estimate_model(folder, quantization=kind).weight_bytes for kind in ("none", "fp8"))
    assert whole - rounded == 3 * linear


def test_layers_that_are_no_linear_ones_cannot_become_fp8() -> None:
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(ModelError, match="none of its layers is a linear one that can be FP8"):
            load(build_fallback("gpt2"), quantization="fp8")


@pytest.mark.integration
def test_forwards_that_graphs_would_replay_give_the_reference_logits() -> None:
    """Padded rows and tokens without a slot; the kernels are interpreted, and launches take the place of graphs."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    arguments = [sys.executable, "-W", "ignore", "-m", "tests.model_executor.fallback_graphs", "smollm3"]
    subprocess.run(arguments, cwd=ROOT, env=environment, check=True, timeout=280)


@pytest.mark.parametrize(
    ("name", "lacking", "reason"),
    [
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight is missing from the safetensors"),
        ("gemma3", "language_model.model.layers.1.", "model.layers.1.input_layernorm.weight and 12 more are missing"),
        (
            "phimoe",
            "model.layers.1.block_sparse_moe.experts.0.w1.",
            "model.layers.1.mlp.experts.gate_up_proj is missing in part",
        ),
    ],
)
def test_tensors_that_the_files_lack_are_refused_by_their_headers(
    name: str, lacking: str, reason: str, tmp_path: Path
) -> None:
    """transformers would draw them at random, and parts for images are no tensors of a text model."""
    folder = Path(shutil.copytree(build_fallback(name), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith(lacking)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(ModelError, match=f"cannot be run through transformers: tensor {re.escape(reason)}"):
            load(folder, model_impl="transformers")


def test_another_class_than_the_decoder_of_its_type_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build("smollm3"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["SmolLM3ForTokenClassification"]}))
    with pytest.raises(ModelError, match="decoder of model_type smollm3 is SmolLM3ForCausalLM, not"):
        ModelRunner.load(folder, dtype="float32", num_pages=20)


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    config = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match=r"code from a model's folder is never run \(trust_remote_code\)"):
        ModelRunner.load(tmp_path)


def test_ranks_share_the_linear_layers_of_its_plan() -> None:
    whole, part = (estimate_model(build("smollm3"), tensor_parallel_size=size) for size in (1, 2))
    layers = 2 * (4 * 32 * 32 - 2 * 16 * 32 + 3 * 32 * 48) * 4  # queries, keys, values, output, MLP in float32
    assert whole.weight_bytes - part.weight_bytes == layers // 2
    assert whole.kv_bytes_per_token == part.kv_bytes_per_token  # of all ranks


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("gpt2", 2, "transformers has no plan of how to share it"),
        ("qwen2_moe", 2, "its layers.0.mlp.experts would be shared as moe_tp_experts"),
        ("smollm3", 4, "it does not divide its 2 key and value heads"),
        ("gemma3n_text", 2, "its activation_sparsity_pattern compares all features of a token"),
    ],
)
def test_ranks_are_refused_before_anything_is_loaded(name: str, size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        estimate_model(build_fallback(name), tensor_parallel_size=size)
    assert caught.value.field == "tensor_parallel_size"


def test_experts_on_ranks_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel: must be off for Qwen2MoeForCausalLM, which runs"):
        estimate_model(build_fallback("qwen2_moe"), tensor_parallel_size=2, enable_expert_parallel=True)


def test_ranks_share_layers_that_become_fp8() -> None:
    whole, part = (estimate_model(build("smollm3"), tensor_parallel_size=size, quantization="fp8") for size in (1, 2))
    assert whole.weight_bytes - part.weight_bytes == 2 * (4 * 32 * 32 - 2 * 16 * 32 + 3 * 32 * 48) // 2


def test_blocks_that_ranks_cannot_share_whole_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = quantize_folder(build("smollm3"), tmp_path / "model", FORMATS["wide blocks"])
    with pytest.raises(
        ConfigError, match="has 32 columns in blocks of 128, which as many ranks cannot share"
    ) as caught:
        estimate_model(folder, tensor_parallel_size=2)
    assert caught.value.field == "tensor_parallel_size"


def test_the_estimate_counts_its_parameters() -> None:
    found = estimate_model(build("smollm3"))
    assert "through transformers: SmolLM3ForCausalLM, expect" in found.path
    tensors = load_file(build("smollm3") / "model.safetensors").values()
    assert found.weight_bytes == 4 * sum(tensor.numel() for tensor in tensors)


@pytest.mark.integration
def test_parts_for_images_are_left_out() -> None:
    names = ("gemma4", "gemma4_text")
    found, text = (estimate_model(build_fallback(name), model_impl="transformers") for name in names)
    assert found.is_text_part
    assert found.weight_bytes == text.weight_bytes


def whole_model(source: Path, folder: Path) -> Path:
    """Gemma 3n as published around a text model: transformers makes its other parts with a library that text does not
    need.
    """
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file({**named, "model.vision_tower.x": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    own = json.loads((source / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": own,
        "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc"},
        "quantization_config": own.pop("quantization_config", None), "eos_token_id": [7, 9],
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.mark.integration
def test_the_text_part_of_a_whole_model_is_run_by_its_own_decoder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, text = build_fallback("gemma3n_text"), random_ids(20, seed=3)
    folder = whole_model(source, tmp_path / "model")
    assert estimate_model(folder).is_text_part
    assert estimate_model(folder).weight_bytes == estimate_model(source).weight_bytes
    runner = ModelRunner.load(folder, dtype="float32", num_pages=20)
    assert runner.config.eos_token_ids == (7, 9)
    sequence = runner.sequences.open(20)
    found = runner.forward([ForwardRow(sequence, text, 20)])
    torch.testing.assert_close(found, reference_logits(source, text), atol=TOLERANCE, rtol=0)
    assert "only text is served" in caplog.text
    assert "not used" not in caplog.text


@pytest.mark.integration
def test_a_text_part_may_be_fp8(tmp_path: Path) -> None:
    source, ids = build_fallback("gemma3n_text"), random_ids(24, seed=3)
    config = compressed("channel", {"strategy": "token", "dynamic": True}, ["lm_head", "re:.*altup.*"])
    kept = ("lm_head", "altup", "altup_projections", "altup_unembed_projections")
    form = replace(FORMATS["channel"], config=config, kept=kept)
    folder = quantize_folder(source, tmp_path / "fp8", form)
    runner = ModelRunner.load(whole_model(folder, tmp_path / "whole"), dtype="float64", num_pages=20)
    found = runner.forward([ForwardRow(runner.sequences.open(24), ids, 24)])
    with torch.no_grad():
        expected = fp8_reference(source, folder, form)(torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


ODD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ({"num_attention_heads": "4"}, "num_attention_heads"),
    ({"vocab_size": None}, "vocab_size"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type dynamic is not supported through"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "rope type spiral is not supported through transformers"),
    (
        {"sliding_window": 0, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
        "at least 1, and is 0",
    ),
    ({"quantization_config": {"quant_method": "fp8"}}, "config.json asks for .*|weight is of type F32; supported are"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq', which is not supported; supported are FP8"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 weights are not supported through transformers"),
    ({"hidden_size": 64, "head_dim": 16}, r"has shape \[.*\]; config\.json asks for \["),
    ({"torch_dtype": "float8", "dtype": "float8"}, "torch_dtype 'float8' is not supported"),
    ({"hidden_act": "nothing"}, "nothing"),
]


@pytest.mark.parametrize(("fields", "reason"), ODD_FIELDS, ids=str)
def test_an_odd_field_is_named(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build("smollm3"), tmp_path / "model"))
    change_config(folder, **fields)
    with pytest.raises(ModelError, match=reason) as caught:
        ModelRunner.load(folder, dtype="float32", num_pages=20)
    assert "supported are Llama" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("deepseek_v3", {"head_dim": 16}, "(hidden_size 32, num_attention_heads 4, head_dim 16, qk_rope_head_dim 4): "),
        ("granitemoehybrid", {"layer_types": ["sliding_attention"] * 2}, ", layer_types sliding_attention): KeyError"),
        ("gemma3n_text", {"hidden_activation": "nothing"}, "transformers has no hidden_activation 'nothing'"),
    ],
)
def test_fields_that_do_not_fit_together_are_named(
    name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(build_fallback(name), tmp_path / "model"))
    change_config(folder, **fields)
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(ModelError, match=re.escape(reason)):
            load(folder)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("rwkv", "rwkv does not say its heads and longest sequence"), ("blt", "blt is no decoder alone")],
)
def test_a_type_without_a_decoder_s_fields_is_refused(model_type: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=f"cannot be run through transformers: .*{reason}"):
        read_model_config(tmp_path)


def test_shards_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    folder, text = Path(shutil.copytree(build("smollm3"), tmp_path / "model")), random_ids(20, seed=3)
    shard(folder)
    index = folder / "model.safetensors.index.json"
    with pytest.raises(ModelError, match=r"index\.json has no metadata, without which transformers does not read it"):
        ModelRunner.load(folder, num_pages=20)
    index.write_text(json.dumps({**json.loads(index.read_text()), "metadata": {}}))
    runner = ModelRunner.load(folder, dtype="float32", num_pages=20)
    forward_and_check(runner, (open_scripted(runner, build("smollm3"), 20), text, None))
    (folder / "part-1.safetensors").unlink()
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(
            ModelError, match=r"part-1\.safetensors is missing, and model\.safetensors\.index\.json names"
        ):
            load(folder)


def test_a_tensor_that_the_model_lacks_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(shutil.copytree(build("smollm3"), tmp_path / "model"))
    change_tensors(folder, lambda tensors: tensors.update({"v_head.weight": torch.ones(3)}))
    ModelRunner.load(folder, num_pages=20)
    assert sum("v_head.weight" in message for message in caplog.messages) == 1


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build("smollm3"), tmp_path / "model"))
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    for load in (estimate_model, ModelRunner.load):
        with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[31\]; config\.json asks for \[32\]"):
            load(folder)
