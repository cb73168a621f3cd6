"""Loading of a draft head: its tensors from its own folder, the embedding from the target's where it has none.

Key lists as published: SafeAILab names the layer ``midlayer.``, Speculators ``layers.0.``; both have ``fc``, ``norm``,
``lm_head``, and with a reduced vocabulary ``d2t`` (for each id of it, what is to be added to get the target's) and
``t2d`` (which of the target's are in it, which ``d2t`` says too).
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.errors import ModelError
from outrider.model_executor.draft_heads.eagle3 import Eagle3Head
from outrider.model_executor.layers.contract import WeightTarget
from outrider.model_executor.loader.checkpoint import StoredTensor, check_tensor, read_tensors
from outrider.model_executor.loader.weights import Progress, copy_tensors

_EMBEDDING = "embed_tokens.weight"
_OF_TARGET = {_EMBEDDING: "model.embed_tokens.weight"}
_IGNORED = ("t2d",)


def load_head(head: Eagle3Head, folder: Path, target_folder: Path, progress: Progress | None = None) -> None:
    """Fill every parameter; ``ModelError`` names the tensor at fault."""
    stored, targets = _find_tensors(head, folder, target_folder)
    with torch.inference_mode():
        copy_tensors(stored, targets, progress)
        head.finish_loading()
    ids = head.target_ids
    if not bool(((ids >= 0) & (ids < head.config.layer.vocab_size)).all()) or len(set(ids.tolist())) != len(ids):
        raise ModelError(f"{folder}: d2t leads to ids that the target has not, or to one of them twice")


def _find_tensors(
    head: Eagle3Head, folder: Path, target_folder: Path
) -> tuple[list[StoredTensor], dict[str, WeightTarget]]:
    """The tensors to read, and where each goes, by its name on file."""
    files = read_tensors(folder)
    named = {_canonical(name): tensor for name, tensor in files.items()}
    wanted = dict(head.weights())
    found: list[StoredTensor] = []
    targets: dict[str, WeightTarget] = {}
    for name, target in wanted.items():
        tensor = named.get(name) or _of_target(name, target_folder)
        if tensor is None:
            raise ModelError(f"{folder}: tensor {name} is missing; an EAGLE-3 head has {', '.join(sorted(wanted))}")
        check_tensor(tensor, target)
        found.append(tensor)
        targets[tensor.name] = target
    unknown = [name for name in named if name not in wanted and name not in _IGNORED]
    if unknown:
        raise ModelError(f"{folder}: tensor {unknown[0][:100]} is not part of an EAGLE-3 head as config.json has it")
    return found, targets


def _canonical(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def _of_target(name: str, target_folder: Path) -> StoredTensor | None:
    return read_tensors(target_folder).get(_OF_TARGET[name]) if name in _OF_TARGET else None
