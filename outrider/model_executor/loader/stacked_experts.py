"""Stacked experts: checkpoints that keep one projection of all experts of a layer in one tensor, as transformers 5 has
them in memory, read as a tensor for each expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.model_executor.loader.checkpoint import StoredTensor
    from outrider.model_executor.models.config import ExpertNames, ExpertsConfig

_BLOCK = re.compile(r"(model\.layers\.\d+\.)mlp\.(gate\.weight|experts\.(?:gate_up|down)_proj)$")
_NUM_AXES = 3


def unstack_experts(tensors: dict[str, StoredTensor], experts: ExpertsConfig) -> None:
    """Replace stacked tensors [E, N, K] by those of each expert, and the router's name by the published one."""
    for name in [name for name in tensors if _BLOCK.match(name)]:
        found = list(_parts(tensors[name], experts.names))
        if found:
            del tensors[name]
            tensors |= {tensor.name: tensor for tensor in found}


def _parts(tensor: StoredTensor, names: ExpertNames) -> Iterator[StoredTensor]:
    layer, rest = _BLOCK.fullmatch(tensor.name).groups()  # type: ignore[union-attr]
    if rest == "gate.weight":
        yield replace(tensor, name=f"{layer}{names.block}.{rest}")
    elif len(tensor.shape) == _NUM_AXES:
        projections = (names.down,) if "down" in rest else (names.gate, names.up)
        rows = tensor.shape[1] // len(projections)
        for expert in range(tensor.shape[0]):
            for number, projection in enumerate(projections):
                part = (slice(expert, expert + 1), slice(number * rows, (number + 1) * rows))
                name = f"{layer}{names.block}.experts.{expert}.{projection}.weight"
                shape = (rows, tensor.shape[2])
                num_bytes = tensor.num_bytes * math.prod(shape) // max(1, math.prod(tensor.shape))
                yield replace(tensor, name=name, shape=shape, num_bytes=num_bytes, part=part)
