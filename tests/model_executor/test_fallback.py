"""Models that transformers computes over our paged cache: logits equal its own, or a reason is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.loader.model import ModelImplementation
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import build, forward_and_check, open_scripted, poisoned_runner, random_ids

SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CASES = [
    ("smollm3", {}),
    ("cohere2", {"sliding_window": 6}),
    ("ministral", SLIDING),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    *(
        pytest.param(name, config, marks=pytest.mark.slow)
        for name, config in (
            ("exaone4", {"sliding_window": 6, "sliding_window_pattern": 2}),
            ("gpt_neox", {}),
            ("phi", {}),
            ("starcoder2", {"sliding_window": 6}),
            ("vaultgemma", SLIDING),
        )
    ),
]


@pytest.mark.parametrize(("architecture", "config"), CASES)
def test_ragged_forwards_give_the_reference_logits(architecture: str, config: dict[str, Any]) -> None:
    """Chunks, scoring, rollback and other texts beside, over scattered pages."""
    folder = build(architecture, **config)
    runner = poisoned_runner(folder, page_size=3, scattered=True)
    assert runner.config.is_fallback
    first, second = (open_scripted(runner, folder, 60) for _ in range(2))
    text, other = random_ids(60, seed=1), random_ids(60, seed=2)
    forward_and_check(runner, (first, text[:20], None))
    forward_and_check(runner, (first, text[20:26], None), (second, other[:11], 1))
    runner.sequences.truncate(first.sequence, 22)
    forward_and_check(runner, (second, other[11:30], None), (first, other[:1], 1))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_native_family_can_be_run_through_transformers(implementation: ModelImplementation) -> None:
    folder, text = build("qwen3"), random_ids(20, seed=3)
    runner = ModelRunner.load(folder, dtype="float32", num_pages=20, model_impl=implementation)
    assert runner.config.is_fallback is (implementation == "transformers")
    forward_and_check(runner, (open_scripted(runner, folder, 20), text, None))


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("bloom", {}, "0 of its 2 layers have our attention"),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "attention with s_aux"),
        ("mamba", {}, "MambaForCausalLM is not supported; supported are Llama"),
    ],
)
def test_what_cannot_be_computed_so_is_refused(architecture: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ModelRunner.load(build(architecture, **config), dtype="float32", num_pages=20)


def test_tensors_that_the_files_lack_are_refused(tmp_path: Path) -> None:
    """transformers would draw them at random."""
    folder = Path(shutil.copytree(build("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=256), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor transformer\.h\.1\.mlp\.c_fc\.weight missing from its files"):
        ModelRunner.load(folder, dtype="float32", num_pages=20)


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


@pytest.mark.parametrize(
    ("options", "field"),
    [({"quantization": "fp8"}, "quantization"), ({"tensor_parallel_size": 2}, "tensor_parallel_size")],
)
def test_settings_that_it_has_not_are_refused_before_anything_is_loaded(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match="runs through transformers") as caught:
        estimate_model(build("smollm3"), **options)
    assert caught.value.field == field


def test_the_estimate_counts_its_parameters() -> None:
    found = estimate_model(build("smollm3"))
    assert "through transformers: SmolLM3ForCausalLM, expect" in found.path
    tensors = load_file(build("smollm3") / "model.safetensors").values()
    assert found.weight_bytes == 4 * sum(tensor.numel() for tensor in tensors)
