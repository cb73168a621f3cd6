"""Loading of a draft head: its tensors from its own folder, embedding and head from the target's where it has none.

How published checkpoints name a head's tensors is the head's to say (``DraftHead.canonical``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.errors import ModelError
from outrider.model_executor.draft_heads.contract import DraftHead
from outrider.model_executor.layers.contract import WeightTarget
from outrider.model_executor.loader.checkpoint import (
    HEAD_NAME,
    StoredTensor,
    check_tensor,
    read_family_tensors,
    read_tensors,
)
from outrider.model_executor.loader.stacked_experts import unstack_experts
from outrider.model_executor.loader.weights import Progress, copy_tensors
from outrider.model_executor.models.config_reader import read_model_config
from outrider.model_executor.models.families import is_native
from outrider.model_executor.models.weights import EMBEDDING_NAME

_OF_TARGET = {
    "embed_tokens.weight": (EMBEDDING_NAME, HEAD_NAME),
    "lm_head.weight": (HEAD_NAME, EMBEDDING_NAME),
}
"""Names of a tensor in the target's checkpoint, in the order of the search; of tied ones it may have one."""

Found = tuple[StoredTensor, WeightTarget]


def load_head(head: DraftHead, folder: Path, target_folder: Path, progress: Progress | None = None) -> None:
    """Fill every parameter; ``ModelError`` names the tensor at fault."""
    found = find_tensors(head, folder, target_folder)
    with torch.inference_mode():
        while found:
            # One tensor of the target's may have to go to two places.
            now = {pair[0].name: pair for pair in reversed(found)}
            found = [pair for pair in found if now[pair[0].name] is not pair]
            copy_tensors([pair[0] for pair in now.values()], {name: pair[1] for name, pair in now.items()}, progress)
        try:
            head.finish_loading()
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error


def find_tensors(head: DraftHead, folder: Path, target_folder: Path) -> list[Found]:
    """The tensors to read, and where each goes; ``ModelError`` names what is missing, of another shape or too much."""
    own = ((head.canonical(name), tensor) for name, tensor in read_tensors(folder).items())
    named = {name: tensor for name, tensor in own if name is not None}
    if (experts := head.config.layer.experts) is not None:
        named = {name: replace(tensor, name=name) for name, tensor in named.items()}
        unstack_experts(named, experts, head.config.layer.quantization)
    wanted = dict(head.weights())
    found: list[Found] = []
    for name, target in wanted.items():
        tensor = named.get(name)
        if tensor is None and name in head.borrowed:
            tensor = _of_target(name, target_folder)
            _check_borrowed(folder, name, tensor, target)
        if tensor is None:
            raise ModelError(f"{folder}: tensor {name} is missing; {head.kind} has {', '.join(sorted(wanted))}")
        check_tensor(tensor, target)
        found.append((tensor, target))
    unknown = [name for name in named if name not in wanted]
    if unknown:
        raise ModelError(f"{folder}: tensor {unknown[0][:100]} is not part of {head.kind} as config.json has it")
    return found


def _check_borrowed(folder: Path, name: str, tensor: StoredTensor | None, target: WeightTarget) -> None:
    """Raise ``ModelError`` where the target's tensor is of another shape: a head as wide as that has its own."""
    if tensor is not None and tensor.shape != target.shape:
        raise ModelError(
            f"{folder}: tensor {name} {list(target.shape)} is missing, and the target's {tensor.name}"
            f" {list(tensor.shape)} cannot take its place"
        )


def _of_target(name: str, target_folder: Path) -> StoredTensor | None:
    config = read_model_config(target_folder)
    has_family = is_native(config.architecture)
    stored = read_family_tensors(target_folder, config).tensors if has_family else read_tensors(target_folder)
    return next((stored[other] for other in _OF_TARGET[name] if other in stored), None)
