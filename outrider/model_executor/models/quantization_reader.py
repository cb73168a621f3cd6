"""Reading of ``quantization_config``: which published format a checkpoint has.

Formats: ``fp8`` of Qwen, DeepSeek and AutoFP8, ``compressed-tensors`` with ``float-quantized`` weights, ModelOpt's
``FP8``, and ``mxfp4`` of gpt-oss. ``ModelError`` names what is supported for every other one.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from outrider.errors import ModelError
from outrider.model_executor.layers.quantization import MXFP4, Activations, Quantization, Scales
from outrider.model_executor.models.json_files import is_there, read_object, shown, validated

SUPPORTED = (
    "supported are FP8 (E4M3) weights as quant_method fp8 has them (by tensor or weight_block_size), compressed-tensors"
    " float-quantized, ModelOpt's FP8, and mxfp4 of gpt-oss, no other 4 bits; weights of 16 or 32 bits become FP8 with"
    " --quantization fp8"
)
MODELOPT_FILE = "hf_quant_config.json"
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of quantizers that left config.json as it was, and their methods."""
_MAX_GROUPS_SHOWN = 5
_STRICT = ConfigDict(strict=True, extra="ignore")
_Names = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=100_000)]
_Block = Annotated[list[Annotated[int, Field(ge=1, le=1 << 16)]], Field(min_length=2, max_length=2)]


class _Fp8(BaseModel):
    """``quant_method`` fp8."""

    model_config = _STRICT

    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    scale_fmt: str | None = None
    weight_block_size: _Block | None = None
    modules_to_not_convert: _Names | None = None
    ignored_layers: _Names | None = None


class _Numbers(BaseModel):
    """Weights or activations of a group of compressed-tensors."""

    model_config = _STRICT

    num_bits: Literal[8]
    type: Literal["float"]
    strategy: Literal["tensor", "channel", "token", "block", "group"]
    symmetric: Literal[True] = True
    dynamic: bool = False
    block_structure: _Block | None = None
    group_size: Annotated[int, Field(ge=1, le=1 << 16)] | None = None


class _Group(BaseModel):
    """Layers that are quantized alike."""

    model_config = _STRICT

    targets: Annotated[_Names, Field(min_length=1)]
    weights: _Numbers
    input_activations: _Numbers | None = None
    output_activations: None = None


class _CompressedTensors(BaseModel):
    """``quant_method`` compressed-tensors."""

    model_config = _STRICT

    format: Literal["float-quantized", "naive-quantized"]
    """The latter is the same of weights whose inputs are not rounded."""
    config_groups: Annotated[dict[str, _Group], Field(min_length=1)]
    ignore: _Names | None = None


class _ModelOpt(BaseModel):
    """``quant_method`` modelopt, or ``quantization`` of ``hf_quant_config.json``."""

    model_config = _STRICT

    quant_algo: Literal["FP8"]
    exclude_modules: _Names | None = None
    ignore: _Names | None = None


class _Mxfp4(BaseModel):
    """``quant_method`` mxfp4."""

    model_config = _STRICT

    modules_to_not_convert: _Names | None = None


_FP8: TypeAdapter[_Fp8] = TypeAdapter(_Fp8)
_COMPRESSED_TENSORS: TypeAdapter[_CompressedTensors] = TypeAdapter(_CompressedTensors)
_MODEL_OPT: TypeAdapter[_ModelOpt] = TypeAdapter(_ModelOpt)
_MXFP4: TypeAdapter[_Mxfp4] = TypeAdapter(_Mxfp4)


def read_quantization(folder: Path, raw: dict[str, Any]) -> Quantization | None:
    """The format of a model folder's weights by its config.json, ``raw``; None: they are not quantized."""
    path, settings = _settings(folder, raw)
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        named = "no quant_method" if method is None else f"quant_method {shown(method)}, which is not supported"
        raise ModelError(f"{path}: quantization_config has {named}; {SUPPORTED}")
    try:
        found = replace(reader(path, settings), has_fp8_cache=_has_fp8_cache(settings))
        _check_patterns((*found.targets, *found.ignored))
    except ModelError as error:
        raise ModelError(f"{error}; {SUPPORTED}") from error
    return found


def _settings(folder: Path, raw: dict[str, Any]) -> tuple[Path, Any]:
    """Fields that describe a format, and the file that has them."""
    places = (raw.get("quantization_config"), raw.get("compression_config"))  # the latter of older llm-compressor
    found = next(filter(None, (*places, _section(raw.get("text_config")).get("quantization_config"))), None)
    if found is not None or raw.get("quantization_config") is not None:
        return folder / "config.json", found
    if is_there(path := folder / MODELOPT_FILE):
        return path, {"quant_method": "modelopt", **_section(read_object(path).get("quantization"))}
    for name, method in _OLD_FILES.items():
        if is_there(path := folder / name):
            return path, {**read_object(path), "quant_method": method}
    return folder / "config.json", None


def _has_fp8_cache(settings: dict[str, Any]) -> bool:
    """True if keys and values are to be FP8 numbers with one scale each for a layer's; the cache has no other ones."""
    scheme = settings.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return settings.get("kv_cache_quant_algo") == "FP8"
    asked = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return all(scheme.get(name, wanted) == wanted for name, wanted in asked.items())


def _section(content: object) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def _read_fp8(path: Path, settings: dict[str, Any]) -> Quantization:
    read = validated(path, _FP8, settings, ": quantization_config")
    ignored = (r"lm_head$", *_plain(read.modules_to_not_convert), *_plain(read.ignored_layers))
    if read.scale_fmt not in (None, "float"):
        raise ModelError(
            f"{path}: quantization_config: scale_fmt is {shown(read.scale_fmt)}, with which activations have powers of"
            " two as scales (DeepSeek V3.1 and later), which are not supported; only float is"
        )
    is_static = read.activation_scheme == "static"
    if read.weight_block_size is None:
        activations = Activations.STATIC if is_static else Activations.TOKEN
        return Quantization("fp8", Scales.TENSOR, activations, ignored=ignored)
    if is_static:
        raise ModelError(f"{path}: quantization_config: activation_scheme static does not go with weight_block_size")
    rows, columns = read.weight_block_size
    return Quantization(
        "fp8", Scales.BLOCK, Activations.GROUP, (rows, columns), scale_name="weight_scale_inv", ignored=ignored
    )


_STRATEGIES = {
    "tensor": Scales.TENSOR, "channel": Scales.CHANNEL, "block": Scales.BLOCK, "group": Scales.BLOCK,
}  # fmt: skip


def _read_compressed_tensors(path: Path, settings: dict[str, Any]) -> Quantization:
    _check_parts(path, settings)
    read = validated(path, _COMPRESSED_TENSORS, settings, ": quantization_config")
    group, *others = read.config_groups.values()
    if any(other.model_copy(update={"targets": group.targets}) != group for other in others):
        said = ", ".join(name[:40] for name in list(read.config_groups)[:_MAX_GROUPS_SHOWN])
        raise ModelError(
            f"{path}: quantization_config: config_groups {said} are quantized in different ways; supported are groups"
            " that differ in their targets alone"
        )
    weights = _STRATEGIES.get(group.weights.strategy)
    if weights is None or group.weights.dynamic:
        raise ModelError(f"{path}: quantization_config: weights by {group.weights.strategy} are not supported")
    block = tuple(group.weights.block_structure or (128, 128))
    if group.weights.strategy == "group":
        if group.weights.group_size is None:
            raise ModelError(f"{path}: quantization_config: weights by group need a group_size, and have none")
        block = (1, group.weights.group_size)
    activations = _activations(path, group.input_activations, weights, block[1])
    names = [name for one in (group, *others) for name in one.targets]
    targets = () if "Linear" in names else tuple(_named(names))
    return Quantization(
        "compressed-tensors", weights, activations, (block[0], block[1]),
        targets=targets, ignored=tuple(_named(read.ignore)),
    )  # fmt: skip


def _check_parts(path: Path, settings: dict[str, Any]) -> None:
    """Raise ``ModelError`` for a checkpoint that has no groups, or more than FP8 numbers."""
    if settings.get("sparsity_config"):
        raise ModelError(f"{path}: quantization_config has a sparsity_config, and sparse weights are not supported")
    if not settings.get("config_groups"):
        raise ModelError(f"{path}: quantization_config has no config_groups, which say what is quantized")


def _activations(path: Path, read: _Numbers | None, weights: Scales, columns: int) -> Activations:
    if read is None:
        return Activations.UNCHANGED
    if read.strategy == "token" and read.dynamic:
        return Activations.TOKEN
    if read.strategy == "tensor" and not read.dynamic:
        return Activations.STATIC
    if read.strategy == "group" and read.dynamic and weights is Scales.BLOCK and read.group_size in (None, columns):
        return Activations.GROUP
    how = "dynamic" if read.dynamic else "static"
    raise ModelError(f"{path}: quantization_config: {how} activations by {read.strategy} are not supported")


def _read_modelopt(path: Path, settings: dict[str, Any]) -> Quantization:
    read = validated(path, _MODEL_OPT, settings, ": quantization_config")
    names = (*(read.exclude_modules or ()), *(read.ignore or ()))
    ignored = tuple(fnmatch.translate(name) for name in names)
    return Quantization("modelopt", Scales.TENSOR, Activations.STATIC, ignored=ignored)


def _read_mxfp4(path: Path, settings: dict[str, Any]) -> Quantization:
    read = validated(path, _MXFP4, settings, ": quantization_config")
    return replace(MXFP4, ignored=tuple(fnmatch.translate(name) for name in read.modules_to_not_convert or ()))


_READERS = {
    "fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors, "modelopt": _read_modelopt, "mxfp4": _read_mxfp4,
}  # fmt: skip


def _plain(names: Iterable[str] | None) -> list[str]:
    """Patterns of modules and of all that is within them, whatever comes before."""
    return [rf"(.*\.)?{re.escape(name)}(\.|$)" for name in names or ()]


def _named(names: Iterable[str] | None) -> list[str]:
    """Patterns of compressed-tensors: a module, or a regular expression after ``re:``."""
    return [name.removeprefix("re:") if name.startswith("re:") else rf"{re.escape(name)}$" for name in names or ()]


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(f"quantization_config: {shown(pattern)} is no regular expression: {error}") from error
