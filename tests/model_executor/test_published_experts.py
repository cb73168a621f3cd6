"""Names, shapes and types of published checkpoints with experts, and checkpoints whose experts are stacked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from outrider.model_executor.loader.checkpoint import StoredTensor
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.loader.stacked_experts import unstack_experts
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import read_model_config
from outrider.model_executor.models.weights import checkpoint_targets
from tests.model_executor.parity import build, random_ids, reference_logits
from tests.model_executor.test_fp8 import logits_of
from tests.model_executor.test_parity import EXPERTS, KEYS_AS_VALUES
from tests.model_executor.test_published_names import check_uses_all
from tests.support.fallback_models import GEMMA4_EXPERTS
from tests.support.fp8_models import FORMATS, Format, by_row, compressed, fp8_reference, quantize_folder

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151_643, "decoder_sparse_step": 1, "eos_token_id": 151_645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40_960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1_000_000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151_936,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336, "max_position_embeddings": 32_768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1_000_000.0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32_000,
}  # fmt: skip
QWEN3_FP8: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
}  # fmt: skip
MIXTRAL_FP8 = compressed("tensor", {"strategy": "tensor", "dynamic": False}, ["lm_head", "re:.*block_sparse_moe.gate"])


def attention(hidden: int, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }


def modules_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Linear layers of the first layer, routers left out."""
    hidden = config["hidden_size"]
    if config is QWEN3_30B_A3B:
        block, inner, names, shapes = "mlp", 768, "gate_proj up_proj down_proj", attention(hidden, 4096, 512)
    else:
        block, inner, names, shapes = "block_sparse_moe", 14_336, "w1 w3 w2", attention(hidden, 4096, 1024)
    yield from ((f"self_attn.{name}", shape) for name, shape in shapes.items())
    for expert in range(config.get("num_experts") or config["num_local_experts"]):
        for name, shape in zip(names.split(), ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
            yield f"{block}.experts.{expert}.{name}", shape


def scales_of(form: dict[str, Any] | None, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    if form is QWEN3_FP8:
        return {"weight_scale_inv": (shape[0] // 128, shape[1] // 128)}
    return {} if form is None else {"weight_scale": (1,), "input_scale": (1,)}


@pytest.mark.parametrize(
    ("config", "form"),
    [(QWEN3_30B_A3B, None), (QWEN3_30B_A3B, QWEN3_FP8), (MIXTRAL_8X7B, None), (MIXTRAL_8X7B, MIXTRAL_FP8)],
)
def test_a_published_checkpoint_has_what_is_asked_for(
    config: dict[str, Any], form: dict[str, Any] | None, tmp_path: Path
) -> None:
    fields = {**config, "num_hidden_layers": 1, **({} if form is None else {"quantization_config": form})}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    read = read_model_config(tmp_path)
    hidden, rows, is_qwen = config["hidden_size"], config["vocab_size"], config is QWEN3_30B_A3B
    router = "mlp.gate.weight" if is_qwen else "block_sparse_moe.gate.weight"
    expected: dict[str, tuple[int, ...]] = {
        "model.norm.weight": (hidden,), "model.embed_tokens.weight": (rows, hidden), "lm_head.weight": (rows, hidden),
        "model.layers.0.input_layernorm.weight": (hidden,), "model.layers.0.post_attention_layernorm.weight": (hidden,),
        f"model.layers.0.{router}": (128 if is_qwen else 8, hidden),
    }  # fmt: skip
    if is_qwen:
        expected |= {f"model.layers.0.self_attn.{side}_norm.weight": (128,) for side in "qk"}
    fp8 = set()
    for module, shape in modules_of(config):
        name = f"model.layers.0.{module}"
        expected[f"{name}.weight"] = shape
        expected |= {f"{name}.{kind}": size for kind, size in scales_of(form, shape).items()}
        fp8 |= set() if form is None else {f"{name}.weight"}
    targets = checkpoint_targets(read)
    assert {name: target.shape for name, target in targets.items()} == expected
    assert {name for name, target in targets.items() if "F8_E4M3" in target.file_types} == fp8


def test_an_estimate_counts_every_expert(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    norms_of_heads = 48 * (36 - 2) * 128  # stored for each head
    found = estimate_model(tmp_path)
    assert found.weight_bytes == 2 * (30_532_122_624 + norms_of_heads)
    unread = 151_936 * 2048 + 48 * (128 - 8) * 3 * 768 * 2048  # embedding, and experts that are not chosen
    assert found.decoding_bytes == found.weight_bytes - 2 * unread
    with pytest.raises(ConfigError, match="does not divide its 32 attention heads"):
        estimate_model(tmp_path, tensor_parallel_size=3)


def test_an_estimate_is_that_of_the_rank_with_most_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_30B_A3B, "num_experts": 127}))
    cut, whole = (
        estimate_model(tmp_path, tensor_parallel_size=2, enable_expert_parallel=is_parallel).weight_bytes
        for is_parallel in (False, True)
    )
    assert 2 * (whole - cut) == 48 * 2 * 3 * 768 * 2048  # 64 experts in place of 63.5


QWEN3_VL_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
    "text_config": {
        **{name: value for name, value in QWEN3_30B_A3B.items() if name not in ("architectures", "torch_dtype")},
        "model_type": "qwen3_vl_moe_text", "dtype": "bfloat16", "max_position_embeddings": 262_144,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5_000_000, "num_hidden_layers": 1,
    },
}  # fmt: skip


def test_published_experts_of_qwen3_vl_are_stacked_by_columns(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_30B_A3B))
    experts = read_model_config(tmp_path).experts
    assert experts is not None
    shapes = {"gate_up_proj": (128, 2048, 1536), "down_proj": (128, 768, 2048)}
    tensors = {
        name: StoredTensor(name, tmp_path, "BF16", shape, 2 * 128 * shape[1] * shape[2], name)
        for name, shape in ((f"model.layers.0.mlp.experts.{kind}", shape) for kind, shape in shapes.items())
    }
    unstack_experts(tensors, experts, None)
    last = {
        name: tensors[f"model.layers.0.mlp.experts.127.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")
    }
    assert [tensor.shape for tensor in last.values()] == [(768, 2048), (768, 2048), (2048, 768)]
    assert all(tensor.is_transposed and tensor.num_bytes == 2 * 768 * 2048 for tensor in last.values())
    assert last["up_proj"].part == (slice(127, 128), slice(768, 1536))


def stacked(folder: Path, **tensors: tuple[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """Tensors of a layer's block, by the last parts of their names."""
    names = {f"model.layers.0.mlp.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    return {name: StoredTensor(name, folder, *tensor, 1024, name) for name, tensor in names.items()}


def test_scales_of_a_router_do_not_take_the_place_of_its_weight(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    experts = read_model_config(tmp_path).experts
    assert experts is not None
    tensors = stacked(tmp_path, gate__weight=("F8_E4M3", (128, 2048)), gate__weight_scale_inv=("F32", (1, 16)))
    expected = dict(tensors)
    unstack_experts(tensors, experts, None)
    assert tensors == expected


STACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 24}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
}


def stack(source: Path, folder: Path, *, by_batch: bool = False) -> Path:
    """The checkpoint with experts as transformers has them in memory, [E, 2 I, H] and [E, H, I], or with rows as
    columns, [E, H, 2 I] and [E, I, H].
    """
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        block = f"model.layers.{layer}.block_sparse_moe" if "mixtral" in source.name else f"model.layers.{layer}.mlp"
        gate, up, down = ("w1", "w3", "w2") if "mixtral" in source.name else ("gate_proj", "up_proj", "down_proj")
        count = len(kept[f"{block}.gate.weight"])
        kept[f"model.layers.{layer}.mlp.gate.weight"] = kept.pop(f"{block}.gate.weight")
        stacked = f"model.layers.{layer}.mlp.experts"
        for suffix in ("", "_scale_inv"):
            names = [f"{name}.weight{suffix}" for name in (gate, up, down)]
            if f"{block}.experts.0.{names[0]}" not in tensors:
                continue
            experts = [[tensors[f"{block}.experts.{i}.{name}"] for name in names] for i in range(count)]
            parts = {
                "gate_up_proj": torch.stack([torch.cat(expert[:2]) for expert in experts]),
                "down_proj": torch.stack([expert[2] for expert in experts]),
            }
            for kind, part in parts.items():
                kept[f"{stacked}.{kind}{suffix}"] = part.mT.contiguous() if by_batch else part
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_are_read_one_by_one(name: str, by_batch: bool, tmp_path: Path) -> None:
    architecture, config = STACKED[name]
    source, ids = build(architecture, **config), random_ids(30, seed=2)
    folder = stack(source, tmp_path / source.name, by_batch=by_batch)
    torch.testing.assert_close(logits_of(folder, ids).float(), reference_logits(source, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("by_batch", [False, True])
def test_scales_of_blocks_are_stacked_as_their_weights(by_batch: bool, tmp_path: Path) -> None:
    config = {**EXPERTS, "hidden_size": 64, "moe_intermediate_size": 48}
    folder = quantize_folder(build("qwen3_moe", **config), tmp_path / "fp8", FORMATS["blocks"])
    ids = random_ids(30, seed=2)
    stacked = logits_of(stack(folder, tmp_path / "stacked", by_batch=by_batch), ids)
    torch.testing.assert_close(stacked, logits_of(folder, ids), atol=0, rtol=0)


def test_blocks_of_a_joined_gate_and_up_are_refused_where_they_may_be_in_both(tmp_path: Path) -> None:
    config = {**EXPERTS, "hidden_size": 64, "moe_intermediate_size": 40}
    folder = quantize_folder(build("qwen3_moe", **config), tmp_path / "fp8", FORMATS["blocks"])
    with pytest.raises(ModelError, match="scales of 16 rows, and gates end after 40: a block may lie in gate and up"):
        ModelRunner.load(stack(folder, tmp_path / "stacked"), num_pages=8)


def test_experts_that_a_quantizer_passed_over_are_not_quantized(tmp_path: Path) -> None:
    """Experts of transformers 5 as compressed-tensors leaves them: they are no linear layers."""
    source, form = build("qwen3_moe", **EXPERTS, hidden_size=64, moe_intermediate_size=48), FORMATS["channel"]
    kept = tuple(f"experts.{number}" for number in range(EXPERTS["num_experts"]))
    folder = quantize_folder(source, tmp_path / "fp8", replace(form, kept=(*form.kept, *kept)))
    ids = random_ids(30, seed=2)
    with torch.no_grad():
        expected = fp8_reference(source, folder, form)(torch.tensor([ids])).logits[0].float()
    for stored in (folder, stack(folder, tmp_path / "stacked")):
        torch.testing.assert_close(logits_of(stored, ids), expected, atol=1e-5, rtol=0)
        experts = 2 * EXPERTS["num_experts"] * 3 * 48 * 64
        with_files = estimate_model(stored).weight_bytes
        (stored / "model.safetensors").unlink()
        assert 2 * experts < with_files - estimate_model(stored).weight_bytes < 3 * experts  # float32 in place of FP8


GEMMA_4_26B_A4B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "audio_config": None, "vision_config": {"num_hidden_layers": 1},
    "text_config": {
        "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30, "intermediate_size": 2112,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256,
        "global_head_dim": 512, "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
        "sliding_window": 1024, "vocab_size": 262_144, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 262_144, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
}  # fmt: skip


def test_every_tensor_that_transformers_has_of_gemma_4_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names in transformers are the published ones: stacked experts, and routers without a block around both."""
    from transformers import AutoConfig, AutoModelForImageTextToText  # takes seconds to import

    with torch.device("meta"):
        config = AutoConfig.for_model(**{**GEMMA_4_26B_A4B, "architectures": None})
        model = AutoModelForImageTextToText.from_config(config)
    tensors = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    stacked = "model.language_model.layers.29.experts"
    assert tensors[f"{stacked}.gate_up_proj"] == [128, 1408, 2816]
    assert tensors["model.language_model.layers.0.router.per_expert_scale"] == [128]
    check_uses_all(tmp_path, {"config": GEMMA_4_26B_A4B, "tensors": tensors}, caplog)


def test_quantized_experts_of_gemma_4_are_read_one_by_one(tmp_path: Path) -> None:
    """Quantizers store a tensor for each expert, and leave the router alone."""
    source, ids = build("gemma4_text", **{**GEMMA4_EXPERTS, **KEYS_AS_VALUES}), random_ids(30, seed=2)
    plain = Path(shutil.copytree(source, tmp_path / "plain"))
    tensors, experts = {}, range(GEMMA4_EXPERTS["num_experts"])
    for name, tensor in load_file(source / "model.safetensors").items():
        block, _, kind = name.rpartition(".experts.")
        for expert in experts if block else ():
            parts = dict(zip(("gate_proj", "up_proj"), tensor[expert].chunk(2), strict=True))
            for part, content in (parts if kind == "gate_up_proj" else {kind: tensor[expert]}).items():
                tensors[f"{block}.experts.{expert}.{part}.weight"] = content.contiguous()
        if not block:
            tensors[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    form = Format(compressed("channel", None, ["lm_head", "re:.*router.*"]), by_row, kept=("lm_head", "router.proj"))
    folder = quantize_folder(plain, tmp_path / "fp8", form)
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.0.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    ones = torch.ones(1)
    widened = {
        name: tensor.float() * stored.get(f"{name}_scale", ones)
        for name, tensor in stored.items()
        if not name.endswith(".weight_scale")
    }
    save_file(widened, plain / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(folder, ids), logits_of(plain, ids), atol=1e-5, rtol=0)
    assert (logits_of(folder, ids).float() - reference_logits(source, ids)).abs().max() > 0.01


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build("mixtral", num_local_experts=5), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.4.w3.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.block_sparse_moe\.experts\.4\.w3\.weight is missing"):
        ModelRunner.load(folder, num_pages=8)


def test_synthetic_models_have_no_experts() -> None:
    with pytest.raises(ModelError, match="load_format synthetic makes no models with experts"):
        ModelRunner.load(build("mixtral", num_local_experts=5), num_pages=8, load_format="synthetic")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok should be at most num_experts 128, and is 129"),
        ({"num_experts": 0}, "num_experts"),
        ({"moe_intermediate_size": "768"}, "moe_intermediate_size"),
    ],
)
def test_bad_fields_are_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_30B_A3B, **changes}))
    with pytest.raises(ModelError, match=said):
        read_model_config(tmp_path)
