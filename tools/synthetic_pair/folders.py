"""A synthetic model as a folder in the Hugging Face layout: configuration, tokenizer, shards and their index.

Owns the files. A shard is written as soon as it is full, so that no more than one of them, and the embedding, is in
memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.model_executor.synthetic.recipe import Recipe, write_recipe
from outrider.model_executor.synthetic.weights import WeightMaker
from synthetic_pair.shapes import Shape

DEFAULT_SHARD_BYTES = 2 << 30

Progress = Callable[[int], None]
"""Callback with the bytes of every shard that was written."""


def write_folder(folder: Path, shape: Shape, recipe: Recipe, dtype: torch.dtype) -> None:
    """Write all of a model but its weights; files of an earlier one are removed first."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        old.unlink()
    _write_json(folder / "config.json", shape.config(str(dtype).removeprefix("torch.")))
    _write_json(folder / "generation_config.json", {"do_sample": False})
    _write_tokenizer(folder, shape.vocab_size)
    write_recipe(folder, recipe)


def tensor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of the matrices of a model: what its shards take, norms left out."""
    return shape.num_parameters * dtype.itemsize


@dataclass(slots=True)
class _Shard:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor.cpu().contiguous()
        self.num_bytes += tensor.nbytes


def _fill(maker: WeightMaker, shard_bytes: int) -> Iterator[_Shard]:
    shard = _Shard()
    for name, tensor in maker.tensors():
        if shard.tensors and shard.num_bytes + tensor.nbytes > shard_bytes:
            yield shard
            shard = _Shard()
        shard.add(name, tensor)
    yield shard


def write_shards(
    folder: Path, maker: WeightMaker, *, shard_bytes: int = DEFAULT_SHARD_BYTES, progress: Progress
) -> None:
    """Write the weights of a folder, shard by shard, and their index."""
    names: list[list[str]] = []
    total = 0
    for shard in _fill(maker, shard_bytes):
        save_file(shard.tensors, folder / f"part-{len(names)}.safetensors", metadata={"format": "pt"})
        names.append(list(shard.tensors))
        total += shard.num_bytes
        progress(shard.num_bytes)
    # How many there are, which stands in every name, is known only now.
    weight_map: dict[str, str] = {}
    for index, members in enumerate(names):
        file = f"model-{index + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"part-{index}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(members, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, and words that no text is ever cut into: every id can be shown, and the vocabulary has its full size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    vocab = {character: index for index, character in enumerate(alphabet)}
    vocab |= {f"Ġt{index}": index for index in range(len(alphabet), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
