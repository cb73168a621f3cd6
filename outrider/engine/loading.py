"""Reading safetensors straight into a model's parameters.

Owns finding the files, checking them against what the model needs before anything is read, and copying tensor by
tensor. Never holds a second copy of the model: files are mapped, each tensor goes to its place in a fused parameter,
and a parameter is packed as soon as it is whole. Of a model that several ranks share only the rank's part is read.
Refuses to know architectures.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.engine.models.decoder import Decoder
from outrider.engine.models.linear import Linear
from outrider.engine.models.weights import WeightTarget, is_ignored, weight_targets
from outrider.errors import ModelError

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each tensor."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def load_weights(decoder: Decoder, folder: Path, progress: Progress | None = None) -> None:
    """Fill every parameter from the folder's safetensors; ``ModelError`` names the file or tensor at fault."""
    stored = {tensor.name: tensor for file in _find_files(folder) for tensor in _read_header(file)}
    targets = weight_targets(decoder)
    _check(folder, stored, targets, decoder)
    _copy_all([stored[name] for name in stored if name in targets], targets, progress)
    decoder.head.prepare()


def fill_weights(
    decoder: Decoder, tensors: Iterable[tuple[str, torch.Tensor]], progress: Progress | None = None
) -> None:
    """Fill every parameter from tensors that are made one after the other, named as in a checkpoint."""
    targets = weight_targets(decoder)
    waiting = Counter(target.linear for target in targets.values() if target.linear is not None)
    total = len(targets)
    for name, content in tensors:
        target = targets.pop(name)
        if target.destination is not None:
            target.destination.copy_(content if target.part is None else content[target.part])
        linear = target.linear
        del target, content
        if linear is not None:
            _prepare_when_whole(linear, waiting)
        if progress is not None:
            progress(total - len(targets), total)
    if targets:
        raise ModelError(f"{_some(list(targets))} not made")
    decoder.head.prepare()


def _find_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        return _indexed_files(index)
    single = folder / _SINGLE
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no {_SINGLE}, no {_INDEX} and no other *.safetensors")
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index: it should map tensor names to files under weight_map") from error
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is not a file beside it")
        if not (index.parent / name).is_file():
            raise ModelError(f"{index.parent / name} is missing, and {index.name} names it")
    return [index.parent / name for name in names]


def _read_header(file: Path) -> list[_StoredTensor]:
    """The file's tensors in the order of their bytes; the size it promises is compared with the size it has."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(_LENGTH_BYTES))
            if header_bytes > size:
                raise ModelError(f"{file} is truncated or no safetensors file: {size} bytes, too few for its header")
            header: dict[str, Any] = json.loads(stream.read(header_bytes))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        entries.sort(key=lambda item: item[1]["data_offsets"][0])
        tensors = [_stored_tensor(file, name, entry) for name, entry in entries]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{file} is truncated or no safetensors file: its header cannot be read") from error
    promised = _LENGTH_BYTES + header_bytes + sum(tensor.num_bytes for tensor in tensors)
    if size < promised:
        raise ModelError(f"{file} is truncated: it has {size} bytes and its header promises {promised}")
    return tensors


def _stored_tensor(file: Path, name: str, entry: dict[str, Any]) -> _StoredTensor:
    start, end = entry["data_offsets"]
    return _StoredTensor(name, file, str(entry["dtype"]), tuple(entry["shape"]), end - start)


def _check(folder: Path, stored: dict[str, _StoredTensor], targets: dict[str, WeightTarget], decoder: Decoder) -> None:
    missing = [name for name in targets if name not in stored]
    if missing:
        raise ModelError(f"{folder}: {_some(missing)} missing from the safetensors files")
    unknown = [name for name in stored if name not in targets and not is_ignored(name, decoder)]
    if unknown:
        raise ModelError(
            f"{folder}: {_some(unknown)} not part of a {decoder.config.architecture} as config.json has it"
        )
    for name, target in targets.items():
        tensor = stored[name]
        if tensor.shape != target.shape:
            raise ModelError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}"
            )
        if tensor.dtype not in _FLOAT_TYPES:
            raise ModelError(
                f"{tensor.file}: {name} is of type {tensor.dtype}; supported are {', '.join(_FLOAT_TYPES)}"
            )


def _some(names: list[str]) -> str:
    rest = len(names) - 1
    return f"tensor {names[0]} is" if not rest else f"tensor {names[0]} and {rest} more are"


def _copy_all(tensors: list[_StoredTensor], targets: dict[str, WeightTarget], progress: Progress | None) -> None:
    waiting = Counter(target.linear for target in targets.values() if target.linear is not None)
    sizes = {tensor.name: _bytes_read(tensor, targets[tensor.name]) for tensor in tensors}
    total, done = sum(sizes.values()), 0
    for tensor, content in _read_parts([tensor for tensor in tensors if sizes[tensor.name]], targets):
        target = targets.pop(tensor.name)
        if target.destination is not None:
            target.destination.copy_(content)
        linear = target.linear
        del target, content  # they would keep alive what preparing lets go
        if linear is not None:
            _prepare_when_whole(linear, waiting)
        done += sizes[tensor.name]
        if progress is not None:
            progress(done, total)


def _prepare_when_whole(linear: Linear, waiting: Counter[Linear]) -> None:
    waiting[linear] -= 1
    if not waiting[linear]:
        linear.prepare()


def _bytes_read(tensor: _StoredTensor, target: WeightTarget) -> int:
    return tensor.num_bytes * target.num_values // max(1, math.prod(tensor.shape))


def _read_parts(
    tensors: Iterable[_StoredTensor], targets: dict[str, WeightTarget]
) -> Iterator[tuple[_StoredTensor, torch.Tensor]]:
    by_file: dict[Path, list[_StoredTensor]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, members in by_file.items():
        try:
            with safe_open(file, framework="pt") as handle:
                for tensor in members:
                    yield tensor, _read(handle, tensor, targets[tensor.name])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error


def _read(handle: Any, tensor: _StoredTensor, target: WeightTarget) -> torch.Tensor:  # noqa: ANN401 - untyped
    is_whole = target.part is None or _bytes_read(tensor, target) == tensor.num_bytes
    content: torch.Tensor = handle.get_tensor(tensor.name) if is_whole else handle.get_slice(tensor.name)[target.part]
    return content
