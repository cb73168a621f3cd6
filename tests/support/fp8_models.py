"""FP8 checkpoints of tiny models, written by the schemas of those who publish them, and what transformers makes of
them: the widened weights, with hooks that round the inputs of quantized layers.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from tests.support.tiny_models import load_reference

FP8 = torch.float8_e4m3fn
Scales = Callable[[torch.Tensor], torch.Tensor]
Rounding = Callable[[torch.Tensor, str], torch.Tensor]


def by_tensor(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().max()[None] / 448


def by_row(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(1, keepdim=True) / 448


def by_block(rows: int, columns: int) -> Scales:
    def scales(weight: torch.Tensor) -> torch.Tensor:
        blocks = [
            [part.abs().max() / 448 for part in torch.split(stripe, columns, 1)]
            for stripe in torch.split(weight, rows, 0)
        ]
        return torch.tensor(blocks)

    return scales


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale for each number of the weight."""
    if scales.dim() < 2:
        return scales.expand(shape)
    block = [-(-size // count) for size, count in zip(shape, scales.shape, strict=True)]
    rows = torch.arange(shape[0]) // block[0]
    return scales[rows][:, torch.arange(shape[1]) // block[1]]


def unrounded(x: torch.Tensor, module: str) -> torch.Tensor:
    return x


def round_groups(size: int | None) -> Rounding:
    def rounded(x: torch.Tensor, module: str) -> torch.Tensor:
        parts = torch.split(x, size or x.shape[-1], -1)
        return torch.cat([to_grid(part, part.abs().amax(-1, keepdim=True) / 448) for part in parts], -1)

    return rounded


def round_static(x: torch.Tensor, module: str) -> torch.Tensor:
    return to_grid(x, input_scale(module))


def to_grid(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(FP8).to(x.dtype) * scale


def input_scale(module: str) -> torch.Tensor:
    """A scale for each module, also for those of one input; some are the same."""
    return torch.tensor((8 + zlib.crc32(module.encode()) % 3) / 512)


@dataclass(frozen=True)
class Format:
    """A published format: what config.json says, how scales are made and named, how inputs are rounded."""

    config: dict[str, Any]
    scales: Scales
    rounding: Rounding = unrounded
    scale_name: str = "weight_scale"
    is_static: bool = False
    kept: tuple[str, ...] = ("lm_head",)
    file: dict[str, Any] = field(default_factory=dict)
    """``hf_quant_config.json``."""
    is_scalar: bool = False
    has_router: bool = False
    """True if routers are quantized too."""

    def covers(self, module: str) -> bool:
        return not any(part in f".{module}." for part in (f".{kept}." for kept in self.kept))


def compressed(weights: str, inputs: dict[str, Any] | None, ignore: list[str], **more: Any) -> dict[str, Any]:
    eight = {"num_bits": 8, "type": "float", "symmetric": True, "observer": "minmax", "actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": weights, "dynamic": False, "block_structure": None, **more},
        "input_activations": None if inputs is None else {**eight, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignore, "kv_cache_scheme": None, "global_compression_ratio": 1.5,
    }  # fmt: skip


FORMATS: dict[str, Format] = {
    "blocks": Format(
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16],
            "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"],
        },
        by_block(16, 16), round_groups(16), "weight_scale_inv", kept=("lm_head", "layers.1.mlp.down_proj"),
    ),
    "wide blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        by_block(128, 128), round_groups(128), "weight_scale_inv",
    ),
    "tensor": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, by_tensor, round_groups(None)),
    "tensor, static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        by_tensor, round_static, is_static=True,
    ),
    "channel": Format(
        compressed("channel", {"strategy": "token", "dynamic": True}, ["lm_head"]), by_row, round_groups(None)
    ),
    "channel and head": Format(
        compressed("channel", {"strategy": "token", "dynamic": True}, []), by_row, round_groups(None), kept=()
    ),
    "weights alone": Format(
        {**compressed("channel", None, ["re:.*lm_head", "re:.*layers[.]0[.]self_attn.*"]), "format": "naive-quantized"},
        by_row, kept=("lm_head", "layers.0.self_attn"),
    ),
    "groups": Format(
        compressed("group", {"strategy": "token", "dynamic": True}, ["lm_head"], group_size=16),
        by_block(1, 16), round_groups(None),
    ),
    "compressed static": Format(
        compressed("tensor", {"strategy": "tensor", "dynamic": False}, ["lm_head"]),
        by_tensor, round_static, is_static=True,
    ),
    "compressed blocks": Format(
        compressed(
            "block", {"strategy": "group", "group_size": 16, "dynamic": True}, ["lm_head"], block_structure=[16, 16]
        ),
        by_block(16, 16), round_groups(16),
    ),
    "modelopt": Format(
        {}, by_tensor, round_static, is_static=True, is_scalar=True,
        file={
            "producer": {"name": "modelopt", "version": "0.33"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head*"]},
        },
    ),
}  # fmt: skip


def quantize_folder(source: Path, folder: Path, form: Format) -> Path:
    """A checkpoint of ``source``'s weights in FP8."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    if form.config:
        config["quantization_config"] = form.config
    if form.file:
        (folder / "hf_quant_config.json").write_text(json.dumps(form.file))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_router = name.endswith(".gate.weight") and not form.has_router
        if tensor.dim() != 2 or "embed" in name or is_router or not form.covers(module):
            tensors[name] = tensor
            continue
        scales = form.scales(tensor)
        tensors[name] = (tensor / spread(scales, tensor.shape)).to(FP8)
        tensors[f"{module}.{form.scale_name}"] = scales.squeeze() if form.is_scalar else scales
        if form.is_static:
            scale = input_scale(module)
            tensors[f"{module}.input_scale"] = scale if form.is_scalar else scale[None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_CASTS = (torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax)


class _Float64(TorchFunctionMode):
    """Mode in which float64 stays float64 where models ask for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def float64_reference(folder: Path) -> torch.nn.Module:
    """transformers' model in float64, norms, softmax and routers too: they compute in float32 otherwise, and of the
    numbers that are then rounded to FP8 some lie near the middle of two, so that each side rounds them another way.
    With recurrent layers, which are in float32 on both sides, it stays so.
    """
    model: torch.nn.Module = load_reference(folder)
    torch.nn.Module.to(model, torch.float64)
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        return model
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.float()  # as everywhere: angles are in float32
    compute = model.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        with _Float64():
            return compute(*inputs, **options)

    model.forward = forward
    return model


def fp8_reference(source: Path, folder: Path, form: Format) -> torch.nn.Module:
    """transformers' model of ``source`` in float64 with the widened weights of ``folder``, inputs rounded."""
    model = float64_reference(source)
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not hasattr(module, "weight") or tensors.get(f"{name}.weight", torch.empty(0)).dtype != FP8:
            continue
        scales = tensors[f"{name}.{form.scale_name}"]
        scales = scales.reshape(1) if scales.dim() == 0 else scales
        numbers = tensors[f"{name}.weight"].double()
        module.weight.data = numbers * spread(scales.double(), numbers.shape)
        module.register_forward_pre_hook(lambda _, inputs, name=name: (form.rounding(inputs[0], name),))
    body: Any = model.model
    for layer, block in enumerate(body.layers):
        if hasattr(block.mlp, "experts"):
            replace_experts(block.mlp.experts, f"model.layers.{layer}.", tensors, form)
    return model


def replace_experts(experts: Any, layer: str, tensors: dict[str, torch.Tensor], form: Format) -> None:
    """Let experts compute with the widened weights, inputs rounded."""
    is_mixtral = f"{layer}block_sparse_moe.gate.weight" in tensors
    block, projections = ("block_sparse_moe", "w1 w3 w2") if is_mixtral else ("mlp", "gate_proj up_proj down_proj")

    def product(x: torch.Tensor, expert: int, projection: str) -> torch.Tensor:
        name = f"{layer}{block}.experts.{expert}.{projection}"
        numbers, scales = tensors[f"{name}.weight"].double(), tensors.get(f"{name}.{form.scale_name}")
        if scales is None:
            return x @ numbers.T
        weight = numbers * spread((scales.reshape(1) if scales.dim() == 0 else scales).double(), numbers.shape)
        return form.rounding(x, name) @ weight.T

    def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up, down = projections.split()
        out = torch.zeros_like(x)
        for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
            row = x[token : token + 1]
            for expert, share in zip(chosen, shares, strict=True):
                inner = torch.nn.functional.silu(product(row, expert, gate)) * product(row, expert, up)
                out[token] += share * product(inner, expert, down)[0]
        return out

    experts.forward = forward
