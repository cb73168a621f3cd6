"""Measured scales of an FP8 KV cache: powers of two over the largest keys and values, the same on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import TargetSettings
from outrider.errors import ModelError
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.kv_calibration import measure_kv_scales
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.loader.description import describe_model
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import build, random_ids
from tests.model_executor.test_fp8_cache import check, expected_logits, load

ARCHITECTURES = ("llama", "qwen3_next")


def scales_of(runner: ModelRunner) -> dict[str, tuple[float, ...]]:
    pairs = [
        layer.attention.kv_scales for layer in runner.worker.model.layers if isinstance(layer.attention, Attention)
    ]
    return dict(zip("kv", zip(*pairs, strict=True), strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scales_keep_all_keys_and_values_in_range(architecture: str) -> None:
    folder = build(architecture)
    runner, wide = (load(folder, kv_cache_dtype=kind, num_state_slots=4) for kind in ("fp8", "auto"))
    measure_kv_scales(runner.worker)
    scales = scales_of(runner)
    assert all(math.frexp(scale)[0] == 0.5 for pair in scales.values() for scale in pair)
    with torch.inference_mode():
        wide.kv_cache.fill_(0.0)
    wide.forward([ForwardRow(wide.sequences.open(60), random_ids(50, seed=7), 1)])
    layers = [n for n, layer in enumerate(wide.worker.model.layers) if isinstance(layer.attention, Attention)]
    for place, number in enumerate(layers):
        for side, largest in zip("kv", wide.kv_cache.layer(number).abs().amax(dim=(0, 2, 3)).tolist(), strict=True):
            assert 448 / 32 < largest / scales[side][place] < 448


def test_logits_are_those_of_a_cache_with_the_measured_scales() -> None:
    folder, ids = build("llama"), random_ids(30, seed=3)
    runner = load(folder)
    measure_kv_scales(runner.worker)
    found = runner.forward([ForwardRow(runner.sequences.open(30), ids, 30)])
    check(found, expected_logits(folder, ids, scales_of(runner)))
    assert scales_of(runner) != {"k": (1.0, 1.0), "v": (1.0, 1.0)}


def test_every_rank_has_the_scales_of_the_largest_values() -> None:
    folder = build("llama")
    alone, shared = load(folder), load(folder)
    measure_kv_scales(alone.worker)
    others = SimpleNamespace(least=lambda value: min(value, -9))  # of ranks with larger keys and values
    measure_kv_scales(shared.worker, others)
    assert max(scales_of(alone)["k"]) < 2.0**9
    assert scales_of(shared) == {"k": (2.0**9,) * 2, "v": (2.0**9,) * 2}


def test_the_setting_measures_and_the_description_says_so() -> None:
    folder = build("llama")
    given = {"model": str(folder), "device": "cpu", "num_pages": 40, "kv_cache_dtype": "fp8"}
    runner = open_runner(TargetSettings.model_validate({**given, "kv_cache_scales": "measured"}))
    scales = sorted({scale for pair in scales_of(runner).values() for scale in pair})
    assert scales[0] < 1
    assert f"fp8 KV cache, scales {scales[0]:.3g}" in describe_model("target", folder, runner).quantization
    plain = open_runner(TargetSettings.model_validate(given))
    assert describe_model("target", folder, plain).quantization == "fp8 KV cache, scales 1"


def test_scales_of_a_cache_that_has_none_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_scales: is measured, and kv_cache_dtype is auto, not fp8"):
        TargetSettings.model_validate({"model": "anything", "kv_cache_scales": "measured"})


def test_large_keys_change_the_scale_of_keys_alone(tmp_path: Path) -> None:
    source = build("llama")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1024
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = load(tmp_path)
    measure_kv_scales(runner.worker)
    scales = scales_of(runner)
    assert scales["k"][1] > 256 * max(scales["k"][0], *scales["v"])


def test_keys_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    source = build("llama")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"].fill_(torch.inf)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="layer 1: keys and values are no finite numbers"):
        measure_kv_scales(load(tmp_path).worker)
