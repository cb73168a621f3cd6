"""Untrained weights, made on the device: for measuring shapes whose files are not at hand.

Owns the noise. Every matrix is normal with the variance that keeps activations of one size, so that nothing overflows
and no product is cheaper than a real one's; what a model of such weights says means nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch

from outrider.model_executor.layers.quantization import MXFP4_GROUP
from outrider.model_executor.models.decoder import Decoder
from outrider.model_executor.models.weights import weight_targets

_EMBEDDING = "model.embed_tokens.weight"
_FP8_DEVIATION = 64.0
"""Standard deviation of FP8 numbers: their largest is seven times this."""
_FP4_DEVIATION = 2.93
"""Standard deviation of FP4 numbers that are equally frequent."""


def noise(decoder: Decoder, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of every weight, made one at a time on the decoder's device; the same seed gives the
    same on the same kind of device, however it is split over ranks.
    """
    shapes = {name: target.shape for name, target in weight_targets(decoder).items()}  # no views, which keep memory
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind in {"blocks", "scales"}:
            yield name, _mxfp4_noise(name, shape, decoder.device, seed)
            continue
        made = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        if kind == "bias":
            yield name, made.zero_()
        elif kind.startswith("weight_scale"):
            yield name, made.fill_(shapes[f"{module}.weight"][1] ** -0.5 / _FP8_DEVIATION)
        elif kind == "input_scale":
            yield name, made.fill_(1 / _FP8_DEVIATION)
        elif len(shape) == 1:
            yield name, made.fill_(1)
        else:
            generator = torch.Generator(decoder.device).manual_seed(zlib.crc32(name.encode()) ^ (seed << 32))
            is_scaled = any(f"{module}.{scale}" in shapes for scale in ("weight_scale", "weight_scale_inv"))
            scale = _FP8_DEVIATION if is_scaled else 1.0 if name == _EMBEDDING else shape[1] ** -0.5
            yield name, made.normal_(0, scale, generator=generator)


def _mxfp4_noise(name: str, shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    """Random numbers of MXFP4, or scales with which their products have the variance of the inputs."""
    if name.endswith(".scales"):
        exponent = round(-math.log2(_FP4_DEVIATION * (MXFP4_GROUP * shape[1]) ** 0.5))
        return torch.full(shape, 127 + exponent, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) ^ (seed << 32))
    return torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
