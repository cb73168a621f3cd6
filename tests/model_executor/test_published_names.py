"""Names and shapes of published checkpoints: the loader uses each tensor of them, but for those of images.

``published`` has a file for each: its config.json, the number of parameters or bytes that is published for it, and its
tensors, of which ``{40}`` names one for each number below 40, and ``{3,7}`` two. Their shape stands alone, or after the
type of numbers that are not the model's. The files here have their headers and lengths, and no content.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ModelError
from outrider.model_executor.loader.checkpoint import read_checkpoint
from outrider.model_executor.loader.estimate import estimate_model
from outrider.model_executor.models import families, read_model_config, support
from outrider.model_executor.models.families import family_of
from outrider.model_executor.models.tensor_names import is_of_other_part
from outrider.model_executor.models.weights import checkpoint_targets
from tests.model_executor import test_fp8, test_parity
from tests.support.fp8_models import FORMATS

PUBLISHED = {path.stem: path for path in sorted((Path(__file__).parent / "published").glob("*.json"))}
EXPERTS = {"qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b-0924"}
"""Models with 18,000 tensors: the second tier has all layers, the first one two."""
MORE_EXPERTS = {"qwen3-next-80b-a3b"}
"""Models with 75,000 tensors, of which four layers are compared."""
LONGEST = {
    "gemma-2-9b": 8192, "gemma-3-1b": 32_768, "glm-4-9b-0414": 32_768, "mistral-small-24b-2501": 32_768,
    "mixtral-8x7b": 32_768, "olmo-2-1124-7b": 4096, "olmo-3-1025-7b": 65_536, "olmoe-1b-7b-0924": 4096,
    "phi-3-mini-4k": 4096, "phi-4": 16_384, "qwen3-30b-a3b": 40_960, "qwen3-32b": 40_960,
    "qwen3-next-80b-a3b": 262_144, "qwen3.5-27b": 262_144, "qwen3.5-35b-a3b": 262_144,
}  # fmt: skip
"""Tokens of the longest sequence where those are not 131,072."""
NUMBERS = r"\{([\d,]+)\}"
OF_DTYPE = {"bfloat16": "BF16", "float32": "F32"}
BYTES = {"BF16": 2, "F32": 4, "U8": 1}
Tensors = dict[str, Any]


def read_published(name: str, num_layers: int | None = None) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(PUBLISHED[name].read_text())
    if num_layers is not None:
        published = content["config"]["num_hidden_layers"]
        content["config"]["num_hidden_layers"] = num_layers
        content["tensors"] = {
            _of_fewer_layers(key, published, num_layers): shape for key, shape in content["tensors"].items()
        }
    return content


def _of_fewer_layers(key: str, published: int, num_layers: int) -> str:
    numbers = re.match(r"model\.layers\.\{([\d,]+,[\d,]+)\}", key)
    if numbers is not None:
        return key.replace(numbers[1], ",".join(str(n) for n in numbers_of(numbers[1]) if n < num_layers) + ",")
    return key.replace(f"layers.{{{published}}}.", f"layers.{{{num_layers}}}.")


def shape_of(tensor: Any) -> list[int]:
    shape: list[int] = next(iter(tensor.values())) if isinstance(tensor, dict) else tensor
    return shape


def bytes_of(tensor: Any, dtype: str = "BF16") -> int:
    return math.prod(shape_of(tensor)) * BYTES[next(iter(tensor)) if isinstance(tensor, dict) else dtype]


def numbers_of(part: str) -> list[int]:
    """Numbers between braces."""
    return [int(number) for number in part.split(",") if number] if "," in part else list(range(int(part)))


def expanded(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    for template, shape in tensors.items():
        counts = [numbers_of(part) for part in re.findall(NUMBERS, template)]
        pattern = re.sub(NUMBERS, "{}", template)
        yield from ((pattern.format(*numbers), shape) for numbers in itertools.product(*counts))


def write_checkpoint(folder: Path, content: dict[str, Any], *, without: str = "") -> Tensors:
    """Two shards and their index."""
    (folder / "config.json").write_text(json.dumps(content["config"]))
    tensors = {name: shape for name, shape in expanded(content["tensors"]) if name != without}
    dtype, weight_map = OF_DTYPE[content["config"]["torch_dtype"]], {}
    for number in range(2):
        file, end, header = f"model-0000{number + 1}-of-00002.safetensors", 0, dict[str, Any]()
        for name in list(tensors)[number::2]:
            start, end = end, end + bytes_of(tensors[name], dtype)
            kind = next(iter(tensors[name])) if isinstance(tensors[name], dict) else dtype
            header[name] = {"dtype": kind, "shape": shape_of(tensors[name]), "data_offsets": [start, end]}
            weight_map[name] = file
        encoded = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(encoded)) + encoded)
        os.truncate(folder / file, 8 + len(encoded) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def check_uses_all(folder: Path, content: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    tensors = write_checkpoint(folder, content)
    config = read_model_config(folder)
    stored, targets = read_checkpoint(folder, config, warns=True), checkpoint_targets(config)
    used = {tensor.key for name, tensor in stored.items() if name in targets}
    family = family_of(config.architecture)
    assert used == {name for name in tensors if not is_of_other_part(name, family)}
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        *((name, 2 if name in EXPERTS else None) for name in PUBLISHED if name not in MORE_EXPERTS),
        *((name, 4) for name in sorted(MORE_EXPERTS)),
        *(pytest.param(name, None, marks=pytest.mark.integration) for name in sorted(EXPERTS)),
    ],
)
def test_every_tensor_of_a_published_checkpoint_is_used(
    name: str, num_layers: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_uses_all(tmp_path, read_published(name, num_layers), caplog)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_longest_sequence_is_the_published_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_published(name)["config"]))
    assert read_model_config(tmp_path).max_position == LONGEST.get(name, 131_072)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_list_of_names_has_the_published_size(name: str) -> None:
    content = read_published(name)
    found = sum(
        (bytes_of(tensor) if "num_bytes" in content else math.prod(shape_of(tensor)))
        * math.prod(len(numbers_of(part)) for part in re.findall(NUMBERS, template))
        for template, tensor in content["tensors"].items()
    )
    assert found == content.get("num_bytes", content.get("num_parameters"))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in EXPERTS | MORE_EXPERTS])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """One of the last layer's, of a fused one too."""
    content = read_published(name)
    names = [key for key, _ in expanded(content["tensors"]) if ".self_attn." in key and "vision" not in key]
    missing = names[-1]
    write_checkpoint(tmp_path, content, without=missing)
    layer = re.search(r"layers\.\d+\.self_attn\.", missing)
    assert layer is not None
    with pytest.raises(ModelError, match=re.escape(f"model.{layer[0]}") + ".* missing from the safetensors files"):
        read_checkpoint(tmp_path, read_model_config(tmp_path))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in EXPERTS | MORE_EXPERTS])
def test_an_estimate_has_the_published_size(name: str, tmp_path: Path) -> None:
    """An estimate counts all but what belongs to images, and norms that are stored for each head."""
    content = read_published(name)
    (tmp_path / "config.json").write_text(json.dumps(content["config"]))
    found = estimate_model(tmp_path, dtype="bfloat16")
    family = family_of(found.config.architecture)
    text = sum(bytes_of(tensor) for key, tensor in expanded(content["tensors"]) if not is_of_other_part(key, family))
    assert text <= found.weight_bytes <= 1.001 * text


GEMMA_4_12B: dict[str, Any] = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified",
    "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_unified_text", "vocab_size": 262_144, "hidden_size": 3840, "intermediate_size": 15_360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1,
        "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8, "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "final_logit_softcapping": 30.0,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
}  # fmt: skip


def test_gemma_4_has_the_published_shapes(tmp_path: Path) -> None:
    """Counts and shapes that are known of the 12B, of which no list of all names is at hand."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4_12B))
    targets = checkpoint_targets(read_model_config(tmp_path))
    names = [name for name in targets if name.endswith("_proj.weight")]
    assert (len(names), sum("v_proj" in name for name in names)) == (328, 40)
    shapes = {
        "0.self_attn.q_proj.weight": (4096, 3840), "5.self_attn.q_proj.weight": (8192, 3840),
        "5.self_attn.k_proj.weight": (512, 3840), "5.self_attn.o_proj.weight": (3840, 8192),
        "0.mlp.down_proj.weight": (3840, 15_360), "5.self_attn.q_norm.weight": (512,),
        "0.self_attn.q_norm.weight": (256,), "0.layer_scalar": (1,),
    }  # fmt: skip
    assert {name: targets[f"model.layers.{name}"].shape for name in shapes} == shapes


def test_every_family_is_in_the_table() -> None:
    assert {one.architecture for one in support.FAMILIES} == families.FAMILIES.keys()


def test_what_is_said_to_be_compared_is_compared() -> None:
    compared = {architecture for architecture, _ in test_parity.MODELS.values()}
    named = {one.architecture for one in support.FAMILIES if one.compared.startswith("transformers")}
    assert named == {families.architecture_of(name) for name in compared}
    assert compared > {architecture for architecture, _ in test_fp8.MODELS.values()}


def test_every_format_of_the_tests_is_in_the_table() -> None:
    assert {name for one in support.FORMATS for name in one.compared} == {*FORMATS, "mxfp4"}
