"""FP8 checkpoints in every published format: logits, ranks, memory, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.layers.linear import Linear
from outrider.model_executor.layers.linear_method import Features
from outrider.model_executor.layers.linear_methods import linear_method_of
from outrider.model_executor.layers.quantization import Activations, Quantization, Scales
from outrider.model_executor.loader.description import describe_model
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import ModelConfig, read_model_config
from outrider.model_executor.models.weights import weight_bytes
from tests.model_executor.parity import build, random_ids
from tests.model_executor.test_linear import context_of, fill, half
from tests.support.fp8_models import (
    FORMATS,
    FP8,
    Format,
    by_block,
    by_row,
    compressed,
    fp8_reference,
    quantize_folder,
    spread,
)

BIASED = {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BIASED),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"seed": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1},
    ),
    "qwen3.5": ("qwen3_5_text", {"seed": 1, "linear_num_key_heads": 4, "linear_value_head_dim": 16}),
}


DENSE = ("llama", "mistral", "qwen2", "qwen3")


def logits_of(folder: Path, token_ids: list[int], *, chunks: tuple[int, ...] = (), **options: Any) -> torch.Tensor:
    runner = ModelRunner.load(folder, dtype="float64", num_pages=64, **options)
    sequence = runner.sequences.open(len(token_ids))
    found, start = [], 0
    for end in (*chunks, len(token_ids)):
        part = token_ids[start:end]
        found.append(runner.forward([ForwardRow(sequence, part, len(part))]).clone())
        start = end
    return torch.cat(found)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_every_format_gives_the_logits_of_its_widened_weights(model: str, form: str, tmp_path: Path) -> None:
    """One forward and chunks, in float64, in which no input lies so near the middle of two FP8 numbers that a
    sum in another order rounds it otherwise.
    """
    architecture, config = MODELS[model]
    if (model, form) == ("qwen3.5", "wide blocks"):
        pytest.skip("its queries, keys and values have no blocks of their own")
    source = build(architecture, hidden_size=64, intermediate_size=80, **config)
    folder = quantize_folder(source, tmp_path / "fp8", FORMATS[form])
    ids = random_ids(24, seed=3)
    with torch.no_grad():
        expected = fp8_reference(source, folder, FORMATS[form])(torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(logits_of(folder, ids), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits_of(folder, ids, chunks=(7, 8, 13)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("form", "model"), list(zip(FORMATS, itertools.cycle(DENSE), strict=False)))
def test_greedy_tokens_of_200_prompts_are_those_of_the_widened_weights(form: str, model: str, tmp_path: Path) -> None:
    """Prompts of 1 to 8 tokens beside each other, then four steps of all; the reference of experts takes long."""
    architecture, config = MODELS[model]
    source = build(architecture, hidden_size=64, intermediate_size=80, **config)
    folder = quantize_folder(source, tmp_path / "fp8", FORMATS[form])
    runner = ModelRunner.load(folder, dtype="float64", num_pages=250)
    texts = [random_ids(1 + i % 8, seed=i) for i in range(200)]
    sequences, rows = [runner.sequences.open(12) for _ in texts], texts
    for _ in range(4):
        forward_rows = [ForwardRow(one, row, 1) for one, row in zip(sequences, rows, strict=True)]
        rows = [[int(token)] for token in runner.forward(forward_rows).argmax(-1)]
        texts = [text + row for text, row in zip(texts, rows, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    with torch.no_grad():
        expected = fp8_reference(source, folder, FORMATS[form])(padded).logits.argmax(-1)
    for text, tokens in zip(texts, expected.tolist(), strict=True):
        assert text[-4:] == tokens[len(text) - 5 : len(text) - 1]


@pytest.mark.parametrize("model", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("form", ["blocks", "tensor, static", "channel"])
def test_routers_that_are_quantized_too_are_widened(model: str, form: str, tmp_path: Path) -> None:
    """Checkpoints of quantizers that took routers for linear layers, and did not list them as ignored."""
    architecture, config = MODELS[model]
    source = build(architecture, hidden_size=64, intermediate_size=80, **config)
    with_router = replace(FORMATS[form], has_router=True)
    folder = quantize_folder(source, tmp_path / "fp8", with_router)
    ids = random_ids(24, seed=3)
    with torch.no_grad():
        expected = fp8_reference(source, folder, with_router)(torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(logits_of(folder, ids), expected, atol=1e-5, rtol=0)


def test_groups_that_differ_in_their_targets_alone_are_one(tmp_path: Path) -> None:
    form = FORMATS["channel"]
    group = form.config["config_groups"]["group_0"]
    groups = {name: {**group, "targets": [f"re:.*{name}.*"]} for name in ("self_attn", "mlp")}
    folder = quantize_folder(build("llama"), tmp_path / "fp8", form)
    parts = quantize_folder(
        build("llama"), tmp_path / "parts", replace(form, config={**form.config, "config_groups": groups})
    )
    ids = random_ids(24, seed=3)
    torch.testing.assert_close(logits_of(parts, ids), logits_of(folder, ids), atol=0, rtol=0)


def test_weights_are_quantized_while_they_are_loaded(tmp_path: Path) -> None:
    """Same results as weights by rows with tokens' inputs; an FP8 checkpoint stays as it is."""
    source = build("qwen3", hidden_size=64, intermediate_size=80)
    folder = quantize_folder(source, tmp_path / "fp8", FORMATS["channel"])
    ids = random_ids(24, seed=3)
    found = logits_of(source, ids, quantization="fp8")
    torch.testing.assert_close(found, logits_of(folder, ids), atol=1e-5, rtol=0)
    assert torch.equal(logits_of(folder, ids, quantization="fp8"), logits_of(folder, ids))
    assert (found - logits_of(source, ids)).abs().max() > 0.01


def test_greedy_tokens_do_not_depend_on_what_shares_a_forward() -> None:
    """One token a step, alone, and five positions scored at once beside other texts."""
    runner = ModelRunner.load(build("llama"), dtype="float64", num_pages=200, quantization="fp8")
    texts = [random_ids(9 + i, seed=i) for i in range(6)]
    alone = [_greedy(runner, text, 10) for text in texts]
    rows = []
    for text, tokens in zip(texts, alone, strict=True):
        sequence = runner.sequences.open(64)
        runner.forward([ForwardRow(sequence, text, 1)])
        rows.append(ForwardRow(sequence, tokens[:-1], len(tokens) - 1))
    scored = torch.split(runner.forward(rows).argmax(-1), [row.num_logits for row in rows])
    assert [tokens.tolist() for tokens in scored] == [tokens[1:] for tokens in alone]


def _greedy(runner: ModelRunner, text: list[int], count: int) -> list[int]:
    sequence, found = runner.sequences.open(64), []
    for _ in range(count):
        found.append(int(runner.forward([ForwardRow(sequence, text, 1)]).argmax()))
        text = found[-1:]
    runner.sequences.release(sequence)
    return found


@pytest.mark.parametrize("form", ["tensor, static", "channel", "compressed blocks", "weights alone"])
def test_made_weights_have_scales(form: str, tmp_path: Path) -> None:
    folder = quantize_folder(build("llama"), tmp_path / "fp8", FORMATS[form])
    made = logits_of(folder, random_ids(24, seed=3), load_format="dummy")
    assert made.isfinite().all()
    assert 0.3 < made.std() < 3


def test_ranks_hold_parts_of_blocks(tmp_path: Path) -> None:
    """40 of 80 rows begin within a block of 16; columns may not, for their inputs are rounded together."""
    layer = {"a": torch.randn(80, 64), "b": torch.randn(40, 64)}
    form = Quantization("fp8", Scales.BLOCK, Activations.GROUP, (16, 16), scale_name="weight_scale_inv")
    tensors = {}
    for name, weight in layer.items():
        scales = by_block(16, 16)(weight)
        tensors[f"{name}.weight"] = (weight / spread(scales, weight.shape)).to(FP8)
        tensors[f"{name}.weight_scale_inv"] = scales
    x = torch.randn(3, 64)

    def outputs(rank: int, size: int) -> torch.Tensor:
        features = [Features(len(w), half(len(w), rank, size), name) for name, w in layer.items()]
        made = Linear(context_of(rank, size, linear_method_of(form)), Features.all(64), features)
        return fill(made, tensors)(x)

    whole = outputs(0, 1)
    parts = [torch.split(outputs(rank, 2), [40, 20], 1) for rank in range(2)]
    torch.testing.assert_close(torch.cat([part[i] for i in range(2) for part in parts], 1), whole)

    def sums(rank: int, size: int) -> torch.Tensor:
        own = half(64, rank, size)
        made = Linear(context_of(rank, size, linear_method_of(form)), Features(64, own), [Features.all(80, "a")])
        return fill(made, {name: one for name, one in tensors.items() if name[0] == "a"})(x[:, own.start : own.stop])

    torch.testing.assert_close(sums(0, 2) + sums(1, 2), sums(0, 1))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size.*64 columns in blocks of 16"):
        sums(0, 8)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq', which is not supported; supported are FP8"),
        ({"quant_method": "gptq"}, "--quantization fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt should be 'e4m3' or 'float8_e4m3fn', not 'e5m2'; supported are"),
        (
            {"quant_method": "fp8", "scale_fmt": "ue8m0"},
            "scale_fmt is 'ue8m0', with which activations have powers of two as scales (DeepSeek V3.1 and later)",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        (compressed("channel", None, ["re:("]), "is no regular expression"),
        ({**compressed("channel", None, []), "format": "pack-quantized"}, "format should be 'float-quantized'"),
        (compressed("token", None, []), "weights by token are not supported"),
        (compressed("channel", {"strategy": "tensor", "dynamic": True}, []), "dynamic activations by tensor"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo should be 'FP8', not 'NVFP4'"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]},
            "config.json: quantization_config: model.layers.0.self_attn.q_proj is quantized and model.layers.0",
        ),
    ],
)
def test_other_formats_are_refused_with_what_is_supported(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = quantize_folder(build("llama"), tmp_path / "fp8", FORMATS["tensor"])
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(ModelError) as caught:
        ModelRunner.load(folder, num_pages=8)
    assert said in str(caught.value)


FOUR_BITS = {**compressed("group", None, []), "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", {"compression_config": FOUR_BITS}, "format should be 'float-quantized'"),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "awq"}}}, "quant_method 'awq'"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "quant_method 'gptq'"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "quant_method 'awq'"),
    ],
)
def test_formats_are_found_where_older_quantizers_wrote_them(
    name: str, content: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(build("llama"), tmp_path / "model"))
    fields = json.loads((folder / name).read_text()) if name == "config.json" else {}
    (folder / name).write_text(json.dumps({**fields, **content}))
    with pytest.raises(ModelError, match=rf"{name}: quantization_config.*{said}.*no other 4 bits"):
        estimate_model(folder, reads_headers=False)


def test_the_name_of_the_type_may_be_torchs(tmp_path: Path) -> None:
    form = FORMATS["wide blocks"]
    named = replace(form, config={**form.config, "fmt": "float8_e4m3fn", "scale_fmt": "float"})
    ids = random_ids(9, seed=3)
    found = [logits_of(quantize_folder(build("llama"), tmp_path / str(i), f), ids) for i, f in enumerate((form, named))]
    assert torch.equal(*found)


def test_a_checkpoint_without_its_scales_is_refused(tmp_path: Path) -> None:
    form = FORMATS["blocks"]
    folder = quantize_folder(build("llama"), tmp_path / "fp8", replace(form, scale_name="weight_scale"))
    with pytest.raises(ModelError, match=r"weight_scale_inv and \d+ more are missing"):
        ModelRunner.load(folder, num_pages=8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 0.0])
def test_a_scale_that_is_no_positive_number_is_named(value: float, tmp_path: Path) -> None:
    """A zero is refused where it is the scale of a whole tensor."""
    folder = quantize_folder(build("llama"), tmp_path / "fp8", FORMATS["tensor, static"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.input_scale"
    tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{re.escape(name)} should have positive scales, and has {value}"):
        ModelRunner.load(folder, num_pages=8)


def test_blocks_of_zeros_may_have_scales_of_zero(tmp_path: Path) -> None:
    folder = quantize_folder(build("llama"), tmp_path / "fp8", FORMATS["blocks"])
    tensors = load_file(folder / "model.safetensors")
    scales = tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    scales[0, 0] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert logits_of(folder, random_ids(9, seed=1)).isfinite().all()
    scales[0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight_scale_inv should have positive scales, and has nan"):
        ModelRunner.load(folder, num_pages=8)


def test_groups_without_a_size_are_refused(tmp_path: Path) -> None:
    folder = quantize_folder(build("llama"), tmp_path / "fp8", FORMATS["channel"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = compressed("group", None, ["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="weights by group need a group_size, and have none"):
        read_model_config(folder)


def test_memory_is_counted_by_what_a_device_holds(tmp_path: Path) -> None:
    source = build("llama", hidden_size=64, intermediate_size=80)
    config = read_model_config(quantize_folder(source, tmp_path / "fp8", FORMATS["compressed blocks"]))
    plain = weight_bytes(read_model_config(source), torch.bfloat16, is_widened=False)
    fp8 = weight_bytes(config, torch.bfloat16, is_widened=False)
    linear = sum(layer_values(config) for _ in range(config.num_layers))
    assert fp8 == plain - linear + 4 * linear // 256
    assert weight_bytes(config, torch.bfloat16, is_widened=True) == plain + 4 * linear // 256


def layer_values(config: ModelConfig) -> int:
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return heads * config.head_dim * config.hidden_size + 3 * config.hidden_size * config.intermediate_size


def test_a_description_says_the_format(tmp_path: Path) -> None:
    folder = quantize_folder(build("llama"), tmp_path / "fp8", FORMATS["blocks"])
    described = describe_model("target", folder, ModelRunner.load(folder, num_pages=8))
    assert described.quantization == "fp8 (fp8): weights by 16x16 blocks, activations by groups of 16"
    online = ModelRunner.load(build("llama"), num_pages=8, quantization="fp8")
    assert describe_model("target", build("llama"), online).quantization == (
        "fp8 (online): weights by channel, activations by token"
    )


@pytest.mark.parametrize("head", ["lm_head", "language_model.lm_head"])
def test_a_head_is_ignored_by_each_of_its_names(head: str, tmp_path: Path) -> None:
    """Checkpoints with images name it as a part of the language model."""
    form = Format(compressed("channel", None, [head]), by_row)
    runner = ModelRunner.load(quantize_folder(build("mistral3"), tmp_path / "fp8", form), num_pages=8)
    assert runner.config.quantization is not None
