"""Reading safetensors straight into a model's parameters.

Owns the copying, tensor by tensor; what the files hold is the ``checkpoint``'s to say. Never holds a second copy of the
model: files are mapped, each tensor goes to its place in a fused parameter, and a parameter is packed as soon as it is
whole. Of a model that several ranks share only the rank's part is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import ModelError
from outrider.model_executor.layers.contract import Preparable, WeightTarget
from outrider.model_executor.loader.checkpoint import StoredTensor
from outrider.model_executor.models.decoder import Decoder
from outrider.model_executor.models.weights import weight_targets

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each tensor."""
_SCALES = (".weight_scale", ".weight_scale_inv", ".input_scale")


def load_weights(decoder: Decoder, stored: dict[str, StoredTensor], progress: Progress | None = None) -> None:
    """Fill every parameter from a checkpoint; ``ModelError`` names the file or tensor at fault."""
    targets = weight_targets(decoder)
    copy_tensors([stored[name] for name in stored if name in targets], targets, progress)
    decoder.head.prepare()


def fill_weights(
    decoder: Decoder, tensors: Iterable[tuple[str, torch.Tensor]], progress: Progress | None = None
) -> None:
    """Fill every parameter from tensors that are made one after the other, named as in a checkpoint."""
    targets = weight_targets(decoder)
    waiting = Counter(target.owner for target in targets.values() if target.owner is not None)
    total = len(targets)
    for name, content in tensors:
        target = targets.pop(name)
        target.write(content if target.part is None else content[target.part])
        owner = target.owner
        del target, content
        if owner is not None:
            _prepare_when_whole(owner, waiting)
        if progress is not None:
            progress(total - len(targets), total)
    if targets:
        raise ModelError(f"tensor {next(iter(targets))} was not made, of {len(targets)}")
    decoder.head.prepare()


def copy_tensors(
    tensors: list[StoredTensor], targets: dict[str, WeightTarget], progress: Progress | None = None
) -> None:
    """Read tensors from their files to where they go, by name; layers are made ready as soon as they are whole."""
    waiting = Counter(target.owner for target in targets.values() if target.owner is not None)
    sizes = {tensor.name: _bytes_read(tensor, targets[tensor.name]) for tensor in tensors}
    total, done = sum(sizes.values()), 0
    for tensor, content in _read_parts([tensor for tensor in tensors if sizes[tensor.name]], targets):
        target = targets.pop(tensor.name)
        if tensor.name.endswith(_SCALES):
            _check_scales(tensor, content)
        target.write(content)
        owner = target.owner
        del target, content  # they would keep alive what preparing lets go
        if owner is not None:
            _prepare_when_whole(owner, waiting)
        done += sizes[tensor.name]
        if progress is not None:
            progress(done, total)


def _check_scales(tensor: StoredTensor, content: torch.Tensor) -> None:
    """Raise ``ModelError`` for scales that leave no weight or input what it is; a zero may belong to a block of
    zeros, and not to a whole tensor.
    """
    scales = content.float()
    is_wrong = ~scales.isfinite() | (scales < 0) | ((scales == 0) & (scales.numel() == 1))
    if is_wrong.any():
        wrong = float(scales[is_wrong].flatten()[0])
        raise ModelError(f"{tensor.file}: {tensor.key} should have positive scales, and has {wrong}")


def _prepare_when_whole(owner: Preparable, waiting: Counter[Preparable]) -> None:
    waiting[owner] -= 1
    if not waiting[owner]:
        owner.prepare()


def _bytes_read(tensor: StoredTensor, target: WeightTarget) -> int:
    return tensor.num_bytes * target.num_values // max(1, math.prod(tensor.shape))


def _read_parts(
    tensors: Iterable[StoredTensor], targets: dict[str, WeightTarget]
) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, members in by_file.items():
        try:
            with safe_open(file, framework="pt") as handle:
                for tensor in members:
                    yield tensor, _read(handle, tensor, targets[tensor.name])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error


def _read(handle: Any, tensor: StoredTensor, target: WeightTarget) -> torch.Tensor:  # noqa: ANN401 - untyped
    if tensor.part:
        return _read_stacked(handle.get_slice(tensor.key), tensor, target)
    is_whole = target.part is None or _bytes_read(tensor, target) == tensor.num_bytes
    if tensor.rows is not None:
        rows, *others = target.part or (slice(None),)
        start, stop, _ = rows.indices(tensor.shape[0])
        place = slice(tensor.rows.start + start, tensor.rows.start + stop)
        part: torch.Tensor = handle.get_slice(tensor.key)[(place, *others)]
        return part
    content: torch.Tensor = handle.get_tensor(tensor.key) if is_whole else handle.get_slice(tensor.key)[target.part]
    return content


def _read_stacked(stacked: Any, tensor: StoredTensor, target: WeightTarget) -> torch.Tensor:  # noqa: ANN401 - untyped
    """The part of one of several tensors [N, K] or [N] that are stacked; columns may be in groups, [N, G, K / G]."""
    expert, rows = tensor.part
    taken, *columns = target.part or (slice(None),)
    own = range(rows.start, rows.stop)[taken]
    places = [slice(own.start, own.stop), *columns]
    _, *sizes = stacked.get_shape()
    if len(sizes) > len(tensor.shape):
        start, stop, _ = places[1].indices(tensor.shape[1])
        places[1] = slice(start // sizes[2], -(-stop // sizes[2]))
    content: torch.Tensor = stacked[(expert.start, *(reversed(places) if tensor.is_transposed else places))]
    if tensor.is_transposed:
        return content.T
    return content.flatten(1) if len(sizes) > len(tensor.shape) else content
