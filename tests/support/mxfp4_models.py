"""MXFP4 checkpoints of tiny gpt-oss models, as published, and what transformers makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import load_reference

QUANTIZATION: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_PROJECTIONS = ("gate_up_proj", "down_proj")


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest numbers [..., N, K / 32, 16] and scales [..., N, K / 32] of a weight [..., N, K]."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 6)).clamp(-126, 127)
    scaled = torch.ldexp(groups, -exponents.int()[..., None])
    codes = (scaled.abs()[..., None] - _VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = codes.view(*codes.shape[:-1], 16, 2).unbind(-1)
    return (low | high << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize_folder(source: Path, folder: Path) -> Path:
    """A checkpoint of ``source``'s experts in MXFP4."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(_PROJECTIONS):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor.transpose(1, 2))
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mxfp4_reference(source: Path, folder: Path) -> torch.nn.Module:
    """transformers' model of ``source`` in float32 with the experts of ``folder``, widened by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, tensors = load_reference(source), load_file(folder / "model.safetensors")
    for layer, block in enumerate(model.model.layers):
        for projection in _PROJECTIONS:
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            widened = convert_moe_packed_tensors(
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32
            )
            parameter = getattr(block.mlp.experts, projection)
            assert widened.shape == parameter.shape
            parameter.data = widened
    return cast("torch.nn.Module", model)
