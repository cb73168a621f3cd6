"""Checkpoint of a model folder: its safetensors files, their headers and what ``config.json`` needs of them.

Everything is compared before any memory is taken: headers with the lengths of the files, names and shapes with the
sizes in ``config.json``.
"""

from __future__ import annotations

import itertools
import logging
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from outrider.errors import ModelError
from outrider.limits.bounded_files import MAX_INDEX_BYTES
from outrider.model_executor.layers.contract import WeightTarget
from outrider.model_executor.loader.stacked_experts import unstack_experts
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.families import ModelFamily, family_of
from outrider.model_executor.models.json_files import is_there, parse_object, read_object, validated
from outrider.model_executor.models.tensor_names import name_in_decoder, projection_sizes
from outrider.model_executor.models.weights import EMBEDDING_NAME, checkpoint_targets, is_ignored

_log = logging.getLogger(__name__)
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEAD_NAME = "lm_head.weight"
_LENGTH_BYTES = 8
_OTHER_KINDS = {
    ".bin": "is a pickle, which is not read: save its tensors as safetensors",
    ".gguf": "is a GGUF file, which is not read",
}
"""Files of weights that are not read, by the end of their names."""
_GIT_LFS = b"version "
"""Beginning of the text file that Git has in place of a large one."""
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
_BITS = {
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8},
    **{"U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8},
}
_Size = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Entry(BaseModel):
    """One tensor of a header."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: Annotated[list[_Size], Field(max_length=16)]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]


class _Index(BaseModel):
    """``model.safetensors.index.json``."""

    model_config = ConfigDict(strict=True, extra="ignore")

    weight_map: dict[str, str]


_HEADER: TypeAdapter[dict[str, _Entry]] = TypeAdapter(dict[str, _Entry])
_INDEX: TypeAdapter[_Index] = TypeAdapter(_Index)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    """Name of the parameter that it fills."""
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    key: str
    """Name in its file: another one where a tied model stores only its head, or where it is a part of a tensor."""
    part: tuple[slice, ...] = ()
    """Part of the file's tensor, with one expert's along the first axis; empty: all."""
    is_transposed: bool = False
    """True if the file has its rows along the last axis."""
    rows: slice | None = None
    """Rows of the file's tensor; None: all."""

    def split(self, start: int, size: int, name: str) -> StoredTensor:
        """Some rows as a tensor of their own."""
        num_bytes = self.num_bytes * size // self.shape[0]
        rows = slice(start, start + size)
        return replace(self, name=name, shape=(size, *self.shape[1:]), num_bytes=num_bytes, rows=rows)


@dataclass(frozen=True, slots=True)
class StoredFolder:
    """Tensors of a folder by the names that the decoder has for them, and what its index promises in vain."""

    tensors: dict[str, StoredTensor]
    unmet: dict[str, str]
    """Tensor -> why it is not where the index has it."""


def read_checkpoint(
    folder: Path, config: ModelConfig, *, warns: bool = False, read: StoredFolder | None = None
) -> dict[str, StoredTensor]:
    """Tensors of a model of this ``config`` by name, in the order of their bytes. Reads headers only, unless they were
    ``read`` before.

    ``ModelError`` names the file or tensor at fault when a file contradicts itself, or a tensor that the model needs is
    missing or of another shape. Other tensors are left out; with ``warns`` one warning names them.
    """
    family = family_of(config.architecture)
    stored = read or read_family_tensors(folder, config)
    if family.fused:
        stored = _split(stored, family, config)
    unused = _check_against_config(folder, config, stored)
    if unused and warns:
        _log.warning("%s: %s not used: no part of a %s", folder, _some(unused), config.architecture)
    return stored.tensors


def read_tensors(folder: Path, *, is_whole: bool = False) -> dict[str, StoredTensor]:
    """Every tensor of the folder's files by name, of any model; ``is_whole``: all that its index names is needed."""
    stored = _read_folder(folder)
    if is_whole and stored.unmet:
        raise ModelError(next(iter(stored.unmet.values())))
    return stored.tensors


def read_family_tensors(folder: Path, config: ModelConfig) -> StoredFolder:
    """Every tensor of the folder's files by the name that a decoder of this ``config`` has for it."""
    return _renamed(_read_folder(folder), family_of(config.architecture))


def _renamed(stored: StoredFolder, family: ModelFamily) -> StoredFolder:
    """The same tensors under the names that the decoder has for them."""
    names = {name: name_in_decoder(name, family) for name in (*stored.tensors, *stored.unmet)}
    tensors = {names[name]: replace(tensor, name=names[name]) for name, tensor in stored.tensors.items()}
    return StoredFolder(tensors, {names[name]: why for name, why in stored.unmet.items()})


def _split(stored: StoredFolder, family: ModelFamily, config: ModelConfig) -> StoredFolder:
    """The same tensors, those of fused projections as the parts that the decoder has."""
    sizes, tensors, unmet = projection_sizes(config), dict[str, StoredTensor](), dict[str, str]()
    for name, why in stored.unmet.items():
        unmet |= dict.fromkeys(_names_of_parts(name, family) or [name], why)
    for name, tensor in stored.tensors.items():
        names = _names_of_parts(name, family)
        tensors |= _parts_of(tensor, names, sizes) if names else {name: tensor}
    return StoredFolder(tensors, unmet)


def _names_of_parts(name: str, family: ModelFamily) -> list[str]:
    """Names of a fused tensor's parts; empty for others."""
    block, _, rest = name.rpartition(".")
    block, _, projection = block.rpartition(".")
    return [f"{block}.{part}.{rest}" for part in family.fused.get(projection, ())]


def _parts_of(tensor: StoredTensor, names: list[str], sizes: dict[str, int]) -> dict[str, StoredTensor]:
    """Parts of a fused tensor, whose rows, or blocks of them, lie one after the other; a single number is each's."""
    if not tensor.shape or tensor.shape[0] == 1:
        return {name: replace(tensor, name=name) for name in names}
    counts = [sizes[name.split(".")[-2]] for name in names]
    block = max(1, sum(counts) // tensor.shape[0])
    starts = list(itertools.accumulate(counts, initial=0))
    if starts[-1] != tensor.shape[0] * block or any(count % block for count in counts):
        raise ModelError(
            f"{tensor.file}: {tensor.key} has {tensor.shape[0]} rows; config.json asks for {starts[-1]} in parts of"
            f" {', '.join(map(str, counts))}"
        )
    return {
        name: tensor.split(start // block, count // block, name)
        for name, start, count in zip(names, starts, counts, strict=False)
    }


def _read_folder(folder: Path) -> StoredFolder:
    index, tensors = folder / INDEX_NAME, dict[str, StoredTensor]()
    weight_map = _read_weight_map(index) if is_there(index) else {}
    files = _indexed_files(index, weight_map)
    if not files or (is_there(folder / SINGLE_NAME) and not all(map(is_there, files))):
        files = _find_files(folder)
    for file in filter(is_there, files):
        for tensor in _read_header(file):
            tensors[tensor.name] = _one_of(tensor, tensors.get(tensor.name, tensor), weight_map)
    return StoredFolder(tensors, _unmet(index, weight_map, tensors))


def _one_of(tensor: StoredTensor, other: StoredTensor, weight_map: dict[str, str]) -> StoredTensor:
    """The copy of a tensor that the index names; ``ModelError`` for two copies of which it names none."""
    if other is tensor:
        return tensor
    for copy in (tensor, other):
        if weight_map.get(tensor.name) == copy.file.name:
            return copy
    raise ModelError(f"{tensor.file} has tensor {tensor.name}, and {other.file.name} has it too")


def _find_files(folder: Path) -> list[Path]:
    single = folder / SINGLE_NAME
    files = [single] if is_there(single) else sorted(folder.glob("*.safetensors"))
    if not files:
        others = [
            f"; {path.name} {why}" for kind, why in _OTHER_KINDS.items() for path in sorted(folder.glob(f"*{kind}"))
        ]
        why = next(iter(others), "")
        raise ModelError(f"{folder} has no {SINGLE_NAME}, no {INDEX_NAME} and no other *.safetensors{why}")
    return files


def has_weights(folder: Path) -> bool:
    """True if the folder has files of weights, of any kind, or an index that names some."""
    names = (INDEX_NAME, *(f"*{kind}" for kind in (".safetensors", *_OTHER_KINDS)))
    return any(next(folder.glob(name), None) is not None for name in names)


def _read_weight_map(index: Path) -> dict[str, str]:
    content = read_object(index, MAX_INDEX_BYTES, may_be_elsewhere=True)
    if not isinstance(content.get("weight_map"), dict):
        raise ModelError(f"{index} is no index: it should map tensor names to files under weight_map")
    return validated(index, _INDEX, content).weight_map


def _indexed_files(index: Path, weight_map: dict[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise ModelError(f"{index} names {name[:100]!r}, which is not a file beside it, a *.safetensors")
    return [index.parent / name for name in names]


def _unmet(index: Path, weight_map: dict[str, str], tensors: dict[str, StoredTensor]) -> dict[str, str]:
    """Tensors that the index names and no file has."""
    unmet = {}
    for name, file in weight_map.items():
        if name not in tensors:
            is_missing = not is_there(index.parent / file)
            unmet[name] = (
                f"{index.parent / file} is missing, and {index.name} names it"
                if is_missing
                else f"{index} says that tensor {name[:100]} is in {file}, and it is not"
            )
    return unmet


def _read_header(file: Path) -> list[StoredTensor]:
    """The file's tensors in the order of their bytes, which have to fill it from the first to the last."""
    if not is_there(file):
        raise ModelError(f"{file} is missing")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = _header_length(file, stream.read(_LENGTH_BYTES), size)
            content = stream.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    header = parse_object(file, content, ": its header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ModelError(f"{file}: __metadata__ of its header should be an object")
    entries = validated(file, _HEADER, header, ": its header")
    tensors = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    end = 0
    for name, entry in tensors:
        end = _check_entry(file, name, entry, start=end)
    promised = _LENGTH_BYTES + header_bytes + end
    if size < promised:
        raise ModelError(f"{file} is truncated: it has {size} bytes and its header promises {promised}")
    if size > promised:
        raise ModelError(f"{file} has {size} bytes and its header promises {promised}")
    return [_stored(file, name, entry) for name, entry in tensors]


def _header_length(file: Path, prefix: bytes, size: int) -> int:
    trouble = f"{file} is truncated or no safetensors file"
    if prefix == _GIT_LFS:
        raise ModelError(f"{file} is a pointer of Git LFS: fetch what it points to, with git lfs pull")
    if len(prefix) < _LENGTH_BYTES:
        raise ModelError(f"{trouble}: {size} bytes, fewer than {_LENGTH_BYTES}")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - _LENGTH_BYTES:
        raise ModelError(f"{trouble}: {size} bytes, too few for its header")
    if length > _MAX_HEADER_BYTES:
        raise ModelError(f"{file}: its header has {length} bytes; at most {_MAX_HEADER_BYTES}")
    return int(length)


def _check_entry(file: Path, name: str, entry: _Entry, *, start: int) -> int:
    """End of the tensor's bytes; ``ModelError`` unless they begin at ``start`` and are those of its shape."""
    begin, end = entry.data_offsets
    if begin != start or end < begin:
        raise ModelError(
            f"{file}: tensor {name[:100]} should begin at {start}, behind the one before it;"
            f" data_offsets are {entry.data_offsets}"
        )
    if entry.dtype not in _BITS:
        return end  # refused if the model needs it
    needed = math.prod(entry.shape) * _BITS[entry.dtype] // 8
    if end - begin != needed:
        raise ModelError(
            f"{file}: tensor {name[:100]} of shape {entry.shape} and type {entry.dtype} takes {needed} bytes;"
            f" data_offsets are {entry.data_offsets}"
        )
    return end


def _stored(file: Path, name: str, entry: _Entry) -> StoredTensor:
    begin, end = entry.data_offsets
    return StoredTensor(name, file, entry.dtype, tuple(entry.shape), end - begin, name)


def _check_against_config(folder: Path, config: ModelConfig, stored: StoredFolder) -> list[str]:
    """Names of the tensors that the model does not use."""
    tensors = stored.tensors
    if config.num_layers > len(tensors) + len(stored.unmet):  # said before as many names are made
        raise ModelError(
            f"{folder}: num_hidden_layers is {config.num_layers} in config.json, and the files have"
            f" {len(tensors)} tensors in all"
        )
    if config.tied_embeddings and EMBEDDING_NAME not in tensors and HEAD_NAME in tensors:
        tensors[EMBEDDING_NAME] = replace(tensors[HEAD_NAME], name=EMBEDDING_NAME)
    if config.experts is not None:
        unstack_experts(tensors, config.experts, config.quantization)
    targets = checkpoint_targets(config)
    missing = [name for name in targets if name not in tensors]
    if missing:
        why = next((stored.unmet[name] for name in missing if name in stored.unmet), None)
        raise ModelError(why or f"{folder}: {_some(missing)} missing from the safetensors files")
    unknown = [name for name in (*tensors, *stored.unmet) if name not in targets and not is_ignored(name, config)]
    if config.quantization is not None:
        _check_quantized(folder, config, unknown, {name.rpartition(".")[0] for name in targets})
    for name, target in targets.items():
        check_tensor(tensors[name], target)
    return [name[:100] for name in unknown]


def _check_quantized(folder: Path, config: ModelConfig, unknown: list[str], modules: set[str]) -> None:
    """Raise ``ModelError`` for a tensor of a known layer, such as another scale: its weights mean something else."""
    of_layers = [name[:100] for name in unknown if name.rpartition(".")[0] in modules]
    if of_layers:
        raise ModelError(f"{folder}: {_some(of_layers)} not part of a {config.architecture} as config.json has it")


def check_tensor(tensor: StoredTensor, target: WeightTarget) -> None:
    """Raise ``ModelError`` for a tensor of another shape or type."""
    is_scalar = not tensor.shape and target.shape == (1,)
    if tensor.shape != target.shape and not is_scalar:
        raise ModelError(
            f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}"
        )
    if tensor.dtype not in target.file_types:
        supported = ", ".join(target.file_types)
        raise ModelError(f"{tensor.file}: {tensor.name} is of type {tensor.dtype}; supported are {supported}")


def _some(names: list[str]) -> str:
    rest = len(names) - 1
    return f"tensor {names[0]} is" if not rest else f"tensor {names[0]} and {rest} more are"
