"""Recorded key lists of published heads fit what is loaded: every name, every shape, nothing over.

``published/*.json`` hold names, types and shapes, transcribed from public code and configurations; each file says from
which. Weights are holes of sparse files, and heads are made without memory.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import ModelError
from outrider.model_executor.draft_heads.config import read_eagle3_config
from outrider.model_executor.draft_heads.contract import DraftHead
from outrider.model_executor.draft_heads.dflash import DFlashHead
from outrider.model_executor.draft_heads.dflash_config import read_dflash_config
from outrider.model_executor.draft_heads.eagle import EagleHead, read_eagle_config
from outrider.model_executor.draft_heads.eagle3 import Eagle3Head
from outrider.model_executor.draft_heads.loading import find_tensors
from outrider.model_executor.draft_heads.mtp import MtpHead, read_mtp_config
from outrider.model_executor.loader.checkpoint import read_checkpoint
from outrider.model_executor.models import read_model_config
from outrider.model_executor.models.weights import checkpoint_targets
from outrider_draft.proposers.medusa import MedusaProposer
from outrider_draft.proposers.mlp_speculator import MlpSpeculatorProposer

RECORDED = {path.stem: json.loads(path.read_text()) for path in Path(__file__).with_name("published").glob("*.json")}
META: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("meta")}
TYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
SIZES = {"F16": 2, "BF16": 2, "I64": 8, "BOOL": 1}
Tensors = dict[str, Any]
"""Name: (type, shape)."""


def of_methods(*methods: str) -> list[str]:
    return sorted(name for name, recorded in RECORDED.items() if recorded["method"] in methods)


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A folder whose safetensors file has a header and a hole."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    content = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def trunk(folder: Path, config: dict[str, Any], more: Tensors) -> Path:
    """A whole target."""
    own = write(folder.with_name("config"), config, {})
    targets = checkpoint_targets(read_model_config(own))
    return write(folder, config, {name: ("BF16", target.shape) for name, target in targets.items()} | more)


def head_of(method: str, folder: Path, target: Path) -> DraftHead:
    if method == "eagle":
        return EagleHead(read_eagle_config(folder, target), **META)
    if method == "eagle3":
        return Eagle3Head(read_eagle3_config(folder, target), **META)
    if method == "dflash":
        return DFlashHead(read_dflash_config(folder, target), **META)
    return MtpHead(read_mtp_config(target), **META)


def placed(tmp_path: Path, name: str, **changes: Any) -> tuple[DraftHead, Path, Path]:
    """Head, its folder and the target's; ``changes`` of tensors, None takes one away."""
    recorded = RECORDED[name]
    tensors = {key: value for key, value in {**recorded["tensors"], **changes}.items() if value is not None}
    if recorded["method"] == "mtp":
        folder = target = trunk(tmp_path / "target", recorded["config"], tensors)
    else:
        folder = write(tmp_path / "head", recorded["config"], tensors)
        target = trunk(tmp_path / "target", recorded["target"], {})
    return head_of(recorded["method"], folder, target), folder, target


HEADS = of_methods("eagle", "eagle3", "mtp", "dflash")


@pytest.mark.parametrize("name", HEADS)
def test_every_recorded_tensor_has_its_place(tmp_path: Path, name: str) -> None:
    head, folder, target = placed(tmp_path, name)
    found = find_tensors(head, folder, target)
    own = {tensor.name for tensor, _ in found if tensor.file.parent == folder}
    assert own - {"model.embed_tokens.weight", "lm_head.weight"} == set(RECORDED[name]["tensors"]) - {
        "t2d", "lm_head.weight"
    }  # fmt: skip
    borrowed = {tensor.name for tensor, _ in found if tensor.file.parent == target}
    if name != "mimo_7b_mtp":
        wanted = {f"model.{key}" if "embed" in key else key for key in head.borrowed}
        assert borrowed == {key for key in wanted if key.removeprefix("model.") not in RECORDED[name]["tensors"]}
    assert len(found) == len(dict(head.weights()))


@pytest.mark.parametrize("name", HEADS)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path, name: str) -> None:
    lost = next(key for key in RECORDED[name]["tensors"] if key.endswith("mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"mlp.up_proj.weight is missing; an? .* has "):
        find_tensors(*placed(tmp_path, name, **{lost: None}))
    (tmp_path / "second").mkdir()
    with pytest.raises(ModelError, match=r"mlp.up_proj.weight has shape \[3, 5\]; config.json asks for \["):
        find_tensors(*placed(tmp_path / "second", name, **{lost: ("BF16", [3, 5])}))


def test_mimo_is_a_target_with_its_mtp_layer(tmp_path: Path) -> None:
    recorded = RECORDED["mimo_7b_mtp"]
    folder = trunk(tmp_path / "target", recorded["config"], recorded["tensors"])
    config = read_model_config(folder)
    stored = read_checkpoint(folder, config)
    assert (config.qkv_bias, config.output_bias, config.sliding_window, config.rope.theta) == (
        True,
        False,
        None,
        640000,
    )
    assert set(recorded["tensors"]) < set(stored)


@pytest.mark.parametrize("name", of_methods("medusa", "mlp_speculator"))
def test_heads_without_a_cache_take_every_recorded_tensor(name: str) -> None:
    recorded = RECORDED[name]
    kind = MedusaProposer if recorded["method"] == "medusa" else MlpSpeculatorProposer

    weights = {
        key.replace(kind.prefix, "", 1): torch.empty(shape, dtype=TYPES[dtype], device="meta")
        for key, (dtype, shape) in recorded["tensors"].items()
    }
    proposer = kind(weights, recorded["config"])
    assert proposer.vocab_size == recorded["config"].get("vocab_size", 32000)
    for key in weights:
        if not key.endswith(".bias") or recorded["method"] != "medusa":
            with pytest.raises(ModelError, match="is missing; the folder has"):
                kind({name: tensor for name, tensor in weights.items() if name != key}, recorded["config"])


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_every_record_says_where_it_comes_from(name: str) -> None:
    assert any("github.com/" in source for source in RECORDED[name]["sources"])
