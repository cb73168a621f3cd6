"""FP8 keys and values (``kv_cache_dtype``): logits are transformers' with a cache that rounds what it holds."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from outrider.errors import ModelError
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.kv_calibration import measure_kv_scales
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import TOLERANCE, build, random_ids
from tests.support.fallback_models import GEMMA4, build_fallback
from tests.support.fp8_models import FORMATS, float64_reference, quantize_folder

FP8 = torch.float8_e4m3fn
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gpt-oss": ("gpt_oss", {}),
    "gemma2": ("gemma2", {"sliding_window": 6, "attn_logit_softcapping": 1.5}),
    "gemma4": ("gemma4_text", GEMMA4),
}
SCALES = {"k": (0.37, 0.61), "v": (0.05, 0.0123)}
"""Scales of layers 0 and 1."""


class RoundingCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of transformers, rounded to FP8 numbers times scales."""

    def __init__(self, scales: Mapping[str, tuple[float, ...]]) -> None:
        super().__init__()
        self._scales = scales

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
            return (x.type(torch.float32) * (1.0 / torch.tensor(scale))).clamp(-448, 448).to(FP8).to(x.dtype) * scale

        key, value = (self._scales[side][layer_idx] for side in "kv")
        return super().update(rounded(key_states, key), rounded(value_states, value), layer_idx, *args, **kwargs)


ONES = {"k": (1.0,) * 5, "v": (1.0,) * 5}


@functools.cache
def reference(folder: Path) -> torch.nn.Module:
    model: Any = float64_reference(folder)
    model.set_experts_implementation("eager")  # the grouped one takes no float64
    reference: torch.nn.Module = model
    return reference


def expected_logits(folder: Path, ids: list[int], scales: Mapping[str, tuple[float, ...]] = ONES) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(folder)(
            torch.tensor([ids]), past_key_values=RoundingCache(scales), use_cache=True
        ).logits[0]
    return logits


def load(folder: Path, **options: Any) -> ModelRunner:
    """Model in float64, in which sums in another order round no number otherwise."""
    settings = {"dtype": "float64", "page_size": 3, "num_pages": 120, "kv_cache_dtype": "fp8", **options}
    return ModelRunner.load(folder, **settings)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.clone(), expected[-len(found) :].float(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_rounded_keys_and_values(name: str) -> None:
    """Logits in chunks, after a rollback, and of forks that write to a page that they share."""
    architecture, config = MODELS[name]
    folder, ids, other = build(architecture, **config), random_ids(50, seed=1), random_ids(50, seed=2)
    runner = load(folder)
    first = runner.sequences.open(60)
    for start, end in ((0, 20), (20, 21), (21, 35)):
        check(runner.forward([ForwardRow(first, ids[start:end], end - start)]), expected_logits(folder, ids[:end]))
    runner.sequences.truncate(first, 23)
    text = [*ids[:23], *other[:9]]
    check(runner.forward([ForwardRow(first, other[:9], 9)]), expected_logits(folder, text))
    second = runner.sequences.fork(first, 60)
    found = runner.forward([ForwardRow(first, ids[40:42], 2), ForwardRow(second, other[40:43], 3)])
    check(found[:2], expected_logits(folder, [*text, *ids[40:42]]))
    check(found[2:], expected_logits(folder, [*text, *other[40:43]]))
    runner.sequences.check_integrity()


def test_states_of_recurrent_layers_keep_their_type() -> None:
    """Attention beside them rounds keys and values: a little, the same in chunks."""
    folder, ids = build("qwen3_next"), random_ids(30, seed=1)
    found = []
    for kind, chunks in (("auto", (30,)), ("fp8", (30,)), ("fp8", (11, 12, 30))):
        runner = load(folder, kv_cache_dtype=kind, num_state_slots=4)
        sequence, start, parts = runner.sequences.open(40), 0, []
        for end in chunks:
            parts.append(runner.forward([ForwardRow(sequence, ids[start:end], end - start)]).clone())
            start = end
        found.append(torch.cat(parts))
    assert 10 * TOLERANCE < (found[0] - found[1]).abs().max() < 1
    torch.testing.assert_close(found[1], found[2], atol=TOLERANCE, rtol=0)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("form", "asks"),
    [
        ("channel", {"kv_cache_scheme": SCHEME}),
        ("modelopt", {"kv_cache_quant_algo": "FP8"}),
        ("channel", {"kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}),
        ("channel", {"kv_cache_scheme": {**SCHEME, "num_bits": 4}}),
    ],
)
def test_a_checkpoint_can_ask_for_an_fp8_cache(form: str, asks: dict[str, Any], tmp_path: Path) -> None:
    """Schemes with other scales than the cache has, and the setting, leave it in the type of the model."""
    folder, ids = quantize_folder(build("llama"), tmp_path / "model", FORMATS[form]), random_ids(30, seed=3)
    is_modelopt = form == "modelopt"
    name, part = ("hf_quant_config.json", "quantization") if is_modelopt else ("config.json", "quantization_config")
    written = json.loads((folder / name).read_text())
    written[part].update(asks)
    (folder / name).write_text(json.dumps(written))
    logits = {}
    for kind in ("auto", "model", "fp8"):
        runner = load(folder, kv_cache_dtype=kind)
        logits[kind] = runner.forward([ForwardRow(runner.sequences.open(30), ids, 30)]).clone()
        estimate = estimate_model(folder, dtype="float64", kv_cache_dtype=kind)
        assert estimate.kv_bytes_per_token == runner.kv_cache.layout.bytes_per_token(runner.kv_cache.dtype.itemsize)
    is_asked = "FP8" in asks.values() or SCHEME in asks.values()
    torch.testing.assert_close(logits["auto"], logits["fp8" if is_asked else "model"], atol=0, rtol=0)
    assert (logits["fp8"] - logits["model"]).abs().max() > 10 * TOLERANCE


def test_rounding_shows() -> None:
    """Negative control: the model without it says something else."""
    folder, ids = build("llama"), random_ids(30, seed=1)
    runner = load(folder, kv_cache_dtype="auto")
    found = runner.forward([ForwardRow(runner.sequences.open(30), ids, 30)])
    assert (found - expected_logits(folder, ids)).abs().max() > 10 * TOLERANCE


def with_scales(
    folder: Path, names: dict[str, str], scales: Mapping[str, tuple[float, ...]], architecture: str = "llama"
) -> Path:
    shutil.copytree(build(architecture), folder)
    tensors = load_file(folder / "model.safetensors")
    for side, numbers in scales.items():
        for layer, number in enumerate(numbers):
            tensors[f"model.layers.{layer}.self_attn.{names[side]}"] = torch.tensor(number)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("llama", {"k": "k_scale", "v": "v_scale"}),
        ("llama", {"k": "k_proj.k_scale", "v": "v_proj.v_scale"}),
        ("phi3", {"k": "qkv_proj.k_scale", "v": "qkv_proj.v_scale"}),
    ],
)
def test_scales_are_the_checkpoint_s(architecture: str, names: dict[str, str], tmp_path: Path) -> None:
    folder, ids = with_scales(tmp_path / "model", names, SCALES, architecture), random_ids(30, seed=3)
    runner = load(folder)
    found = runner.forward([ForwardRow(runner.sequences.open(30), ids, 30)])
    check(found, expected_logits(folder, ids, SCALES))
    assert (found - expected_logits(folder, ids)).abs().max() > 10 * TOLERANCE


def test_a_scale_that_is_no_positive_number_is_named(tmp_path: Path) -> None:
    folder = with_scales(tmp_path / "model", {"k": "k_scale", "v": "v_scale"}, {**SCALES, "v": (0.5, 0.0)})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_scale should be one positive number"):
        load(folder)
    assert load(folder, kv_cache_dtype="auto").kv_cache.dtype == torch.float64


def test_the_same_bytes_hold_twice_the_tokens() -> None:
    sizes = {"page_size": 16, "num_pages": None, "kv_cache_bytes": 1 << 20, "max_model_len": 64}
    narrow, wide = (load(build("llama"), dtype="bfloat16", kv_cache_dtype=kind, **sizes) for kind in ("fp8", "auto"))
    assert narrow.sequences.pool.num_pages == 2 * wide.sequences.pool.num_pages
    assert narrow.kv_cache.dtype == FP8


def test_an_estimate_counts_bytes_of_eight_bits() -> None:
    folder = build("llama")
    wide, narrow = (estimate_model(folder, dtype="bfloat16", kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    assert wide.kv_bytes_per_token == 2 * (narrow.kv_bytes_per_token or 0)


THROUGH_TRANSFORMERS = {
    "smollm3": "model.layers.{}.self_attn", "gpt_neox": "gpt_neox.layers.{}.attention",
    "gemma": "model.layers.{}.self_attn", "cohere2": "model.layers.{}.self_attn",
}  # fmt: skip


@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_models_through_transformers_round_their_keys_and_values(name: str, tmp_path: Path) -> None:
    """Scales of the checkpoint, by whatever name its attention has, and measured ones."""
    folder, ids = build_fallback(name), random_ids(40, seed=4)
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for side, numbers in SCALES.items():
        for layer, number in enumerate(numbers):
            tensors[f"{THROUGH_TRANSFORMERS[name].format(layer)}.{side}_scale"] = torch.tensor(number)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    runner = load(tmp_path / "model", model_impl="transformers")
    assert runner.config.is_fallback
    sequence, found = runner.sequences.open(60), []
    for start, end in ((0, 20), (20, 21), (21, 40)):
        found.append(runner.forward([ForwardRow(sequence, ids[start:end], end - start)]).clone())
    layers = runner.worker.model.scaled_layers.values()
    given = {side: (*numbers, *ONES[side])[: len(layers)] for side, numbers in SCALES.items()}
    check(torch.cat(found), expected_logits(folder, ids, given))
    measure_kv_scales(runner.worker)
    measured = dict(zip("kv", zip(*(layer.kv_scales for layer in layers), strict=True), strict=True))
    assert measured not in (given, {side: ONES[side][: len(layers)] for side in "kv"})
    last = runner.forward([ForwardRow(runner.sequences.open(60), ids, 40)])
    check(last, expected_logits(folder, ids, measured))


def test_prefixes_in_the_cache_are_rounded_once() -> None:
    """A sequence that starts after cached pages says what the first did."""
    folder, ids = build("qwen3"), random_ids(40, seed=5)
    runner = load(folder, page_size=4)
    first = runner.sequences.open(60)
    expected = runner.forward([ForwardRow(first, ids, 1)]).clone()
    runner.sequences.commit(first, 40)
    runner.sequences.release(first)
    second = runner.sequences.open(60)
    cached = runner.sequences.adopt_prefix(second, ids)
    assert cached == 36
    found = runner.forward([ForwardRow(second, ids[cached:], 1)])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
