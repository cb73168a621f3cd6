"""Stacked experts: checkpoints that keep one projection of all experts of a layer in one tensor, as transformers 5 has
them in memory, read as a tensor for each expert. Scales of blocks are stacked as their weights are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.errors import ModelError
from outrider.model_executor.layers.quantization import Numbers

if TYPE_CHECKING:
    from outrider.model_executor.layers.quantization import Quantization
    from outrider.model_executor.loader.checkpoint import StoredTensor
    from outrider.model_executor.models.config import ExpertsConfig, ModelConfig

_BLOCK = re.compile(
    r"((?:model\.layers\.\d+\.)?)(?:mlp\.)?(gate\.weight$|experts\.(?:gate_up|down)_proj)(_scale_inv)?$"
)
_ALTERNATING = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(?:_(blocks|scales|bias))?")
_NUM_AXES = 3
_WIDE = ("F64", "F32", "F16", "BF16")


def with_stored_experts(config: ModelConfig, tensors: dict[str, StoredTensor]) -> ModelConfig:
    """The configuration, its experts not quantized if the files have all of them in 16 or 32 bits: quantizers of linear
    layers pass over experts that are stacked in memory, and do not list them among the layers that are ignored. They do
    quantize the gate of a shared expert, and older ones the router, which publishers ignore.
    """
    form, experts = config.quantization, config.experts
    if form is None or form.is_online or experts is None or form.numbers is Numbers.MXFP4:
        return config
    gates = (experts.names.router, f"{experts.names.shared}_gate")
    quantized = {gate for gate in gates if _is_quantized(f".{gate}.weight", tensors)}
    config = replace(config, experts=replace(experts, quantized_gates=frozenset(quantized)))
    types = {tensor.dtype for name, tensor in tensors.items() if ".experts." in name}
    if not types or not types <= set(_WIDE):
        return config
    return replace(config, quantization=replace(form, ignored=(*form.ignored, r".*\.experts\.")))


def _is_quantized(end: str, tensors: dict[str, StoredTensor]) -> bool:
    """True if there are tensors whose names have this end, none of them of 16 or 32 bits."""
    types = {tensor.dtype for name, tensor in tensors.items() if name.endswith(end)}
    return bool(types) and types.isdisjoint(_WIDE)


def unstack_experts(
    tensors: dict[str, StoredTensor], experts: ExpertsConfig, quantization: Quantization | None
) -> None:
    """Replace stacked tensors [E, N, K], or [E, K, N] as Qwen3-VL has them, by those of each expert, and the router's
    name by the published one. ``ModelError`` for blocks that lie in a gate and in an up.
    """
    block = 1 if quantization is None else quantization.block[0]
    is_alternating = experts.names.gate_up is not None
    pattern = _ALTERNATING if is_alternating else _BLOCK
    stacked = {name: tensor for name, tensor in tensors.items() if pattern.fullmatch(name)}
    for name, tensor in stacked.items():
        weight = stacked.get(name.removesuffix("_scale_inv"), tensor)
        if weight is not tensor and "gate_up" in name and experts.intermediate_size % block:
            raise ModelError(
                f"{tensor.file}: {tensor.key} has scales of {block} rows, and gates end after"
                f" {experts.intermediate_size}: a block may lie in gate and up; store a tensor for each expert"
            )
        found = list(_alternating_parts(tensor) if is_alternating else _parts(tensor, weight, experts))
        if found:
            del tensors[name]
            tensors |= {tensor.name: tensor for tensor in found}


def _parts(tensor: StoredTensor, weight: StoredTensor, experts: ExpertsConfig) -> Iterator[StoredTensor]:
    """Tensors of each expert; ``weight``: the tensor itself, or the one whose scales it has."""
    layer, rest, scale = _BLOCK.fullmatch(tensor.name).groups()  # type: ignore[union-attr]
    names = experts.names
    if rest == "gate.weight":
        yield replace(tensor, name=f"{layer}{names.prefix}{rest}")
    elif len(tensor.shape) == len(weight.shape) == _NUM_AXES:
        projections = (names.down,) if "down" in rest else (names.gate, names.up)
        count, *sizes = tensor.shape
        inner, inner_size = int("down" in rest), len(projections) * experts.intermediate_size
        # As transformers decides: only where the sizes do not fit as they are.
        is_transposed = weight.shape[1 + inner] != inner_size and weight.shape[2 - inner] == inner_size
        num_rows, num_columns = reversed(sizes) if is_transposed else sizes
        rows = num_rows // len(projections)
        for expert in range(count):
            for number, projection in enumerate(projections):
                part = (slice(expert, expert + 1), slice(number * rows, (number + 1) * rows))
                name = f"{layer}{names.prefix}experts.{expert}.{projection}.weight{scale or ''}"
                num_bytes = tensor.num_bytes * rows * num_columns // max(1, math.prod(tensor.shape))
                yield replace(
                    tensor, name=name, shape=(rows, num_columns), num_bytes=num_bytes, part=part,
                    is_transposed=is_transposed,
                )  # fmt: skip


def _alternating_parts(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Tensors of each expert, as gpt-oss stacks them: weights [E, K, N], or numbers [E, N, G, K / G] and scales
    [E, N, G], and biases [E, N].
    """
    block, projection, kind = _ALTERNATING.fullmatch(tensor.name).groups()  # type: ignore[union-attr]
    count, *sizes = tensor.shape
    is_transposed, num_axes = kind is None, {None: 2, "blocks": 3, "scales": 2, "bias": 1}[kind]
    if len(sizes) != num_axes:
        return
    if is_transposed:
        sizes.reverse()
    shape = (*sizes[:1], *(math.prod(sizes[1:]) for _ in sizes[1:2]))
    for expert in range(count):
        name, part = f"{block}{expert}.{projection}.{kind or 'weight'}", (slice(expert, expert + 1), slice(0, sizes[0]))
        yield replace(
            tensor, name=name, shape=shape, num_bytes=tensor.num_bytes // count, part=part, is_transposed=is_transposed
        )
