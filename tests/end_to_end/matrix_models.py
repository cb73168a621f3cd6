"""Models of the matrix, by name: every family, every decoder through transformers, every format."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.model_executor.models.support import FALLBACKS
from tests.end_to_end.matrix import Model, Reference
from tests.model_executor import test_fp8, test_fp8_cache
from tests.model_executor.test_parity import MODELS
from tests.support import mxfp4_models
from tests.support.fallback_models import build_fallback
from tests.support.fp8_models import FORMATS, fp8_reference, quantize_folder
from tests.support.tiny_models import cached_tiny_model, load_reference

FAMILIES = (
    *("llama", "mistral-window", "qwen2-sliding-layers", "qwen3-layer-types", "qwen3-moe", "olmoe", "mixtral-window"),
    *("gpt-oss", "gemma3", "gemma3-text-part", "gemma2", "gemma4", "gemma4-experts", "gemma4-text-part"),
    *("gemma4-unified", "gemma4-unified-text-part", "glm", "glm4", "glm4-moe-groups", "granite", "mistral-small"),
    *("qwen2.5-vl-text-part", "qwen3-vl-text-part", "qwen3-vl-moe-text-part", "olmo2", "olmo3", "qwen3.5"),
    *("qwen3.5-text", "qwen3.5-moe", "qwen3.5-moe-text", "qwen3-next", "phi3-window", "phi4-mini"),
)
"""Names in ``MODELS``: one at least of each architecture."""
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 80}
"""Sizes of more than one block."""
ROUNDED = dict(zip(FORMATS, itertools.cycle(name for name in test_fp8.MODELS if name != "qwen3.5")))
"""Formats, each with one of the families. Recurrent layers compute in float32, and what they give is rounded after."""


def _logits(model: torch.nn.Module) -> Reference:
    return lambda ids: model(ids).logits


def _family(place: Path, name: str) -> Model:
    model_type, config = MODELS[name]
    folder = cached_tiny_model(model_type, seed=1, **config)
    return Model(folder, _logits(load_reference(folder)))


def _mimo(place: Path) -> Model:
    """A Qwen2 by another name."""
    source = cached_tiny_model("qwen2", seed=1)
    shutil.copytree(source, place / "mimo")
    _change_config(place / "mimo", architectures=["MiMoForCausalLM"], model_type="mimo")
    return Model(place / "mimo", _logits(load_reference(source)))


def _fallback(place: Path, name: str) -> Model:
    folder = build_fallback(name)
    return Model(folder, _logits(load_reference(folder)))


def _format(place: Path, form: str) -> Model:
    """Float64: no sum in another order rounds an input otherwise."""
    architecture, config = test_fp8.MODELS[ROUNDED[form]]
    source = cached_tiny_model(architecture, **WIDE, **config)
    folder = quantize_folder(source, place / "fp8", FORMATS[form])
    _change_config(folder, dtype="float64")
    return Model(folder, _logits(fp8_reference(source, folder, FORMATS[form])))


def _fallback_format(place: Path, form: str) -> Model:
    source = cached_tiny_model("arcee", **WIDE)
    folder = quantize_folder(source, place / "fp8", FORMATS[form])
    _change_config(folder, dtype="float64")
    return Model(folder, _logits(fp8_reference(source, folder, FORMATS[form])))


def _made_at_load(place: Path, name: str) -> Model:
    architecture, config = test_fp8.MODELS[name]
    source = cached_tiny_model(architecture, **WIDE, **config)
    reference = fp8_reference(source, quantize_folder(source, place / "fp8", FORMATS["channel"]), FORMATS["channel"])
    shutil.copytree(source, place / "wide")
    _change_config(place / "wide", dtype="float64")
    return Model(place / "wide", _logits(reference), {"quantization": "fp8"})


def _mxfp4(place: Path) -> Model:
    source = cached_tiny_model("gpt_oss", intermediate_size=96, hidden_size=64)
    folder = mxfp4_models.quantize_folder(source, place / "mxfp4")
    _change_config(folder, dtype="float32")
    return Model(folder, _logits(mxfp4_models.mxfp4_reference(source, folder)))


def _fp8_cache(place: Path, name: str) -> Model:
    architecture, config = test_fp8_cache.MODELS[name]
    source = cached_tiny_model(architecture, **config)
    shutil.copytree(source, place / "model")
    _change_config(place / "model", dtype="float64")
    settings = {"kv_cache_dtype": "fp8"}
    return Model(place / "model", lambda ids: test_fp8_cache.expected_logits(source, ids[0].tolist())[None], settings)


def _change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


CASES: dict[str, Callable[[Path], Model]] = {
    **{name: functools.partial(_family, name=name) for name in FAMILIES},
    "mimo": _mimo,
    **{
        f"fallback {one.model_type}": functools.partial(_fallback, name=one.model_type)
        for one in FALLBACKS
        if not one.refused
    },
    **{f"fp8 {form}": functools.partial(_format, form=form) for form in FORMATS},
    **{f"fallback fp8 {form}": functools.partial(_fallback_format, form=form) for form in ("blocks", "modelopt")},
    **{f"made at load {name}": functools.partial(_made_at_load, name=name) for name in ("llama", "qwen3_moe")},
    "mxfp4": _mxfp4,
    **{f"fp8 cache {name}": functools.partial(_fp8_cache, name=name) for name in test_fp8_cache.MODELS},
}
