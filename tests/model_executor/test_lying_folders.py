"""Model folders that lie: whatever a file says, the answer is a model that loads or one line that names the file.

Values are drawn from a list of nonsense for every field that is read, and headers, indexes and links are spoilt one by
one. Nothing is allocated for what a file only promises.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import ConfigError, ModelError
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.kv_cache_sizing import check_weights_fit
from outrider.model_executor.layers.contract import WeightTarget
from outrider.model_executor.loader.checkpoint import read_checkpoint
from outrider.model_executor.loader.tokenizer_files import check_tokenizer, read_tokenizer
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import Decoder, ModelConfig, read_model_config
from outrider.model_executor.models.config_schema import ConfigFile, RopeParameters, SpecialTokens
from outrider.model_executor.models.weights import checkpoint_targets, weight_targets
from outrider.tokenization.model_text import JSON_FILES
from tests.model_executor.parity import build
from tests.support.tiny_models import ARCHITECTURES

DEEP = "[" * 100_000
Spoil = Callable[[Path], object]

NONSENSE: list[Any] = [
    *(True, False, -1, 0, 1, 2, 3, 7, 10**7, 10**12, 2**63, 10**400, -(10**30)),
    *(0.0, -0.0, 0.5, -2.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "5", "float32", "\0", "int8", "__class__"),
    *([], [None], [5], [-1], ["x"], [[]], [10**9], {}, {"a": 1}, {"rope_type": 5}, [1.5]),
]


def each(*values: Any) -> tuple[Any, ...]:
    return values


def read(folder: Path) -> None:
    """All that is read of a folder before memory is taken, and its tokenizer."""
    config = read_model_config(folder)
    read_checkpoint(folder, config)
    check_tokenizer(folder, read_tokenizer(folder, vocab_size=config.vocab_size))


def refusal(folder: Path) -> str | None:
    """Error text for a folder; None when it is taken. Any error but these two is a failure of the test."""
    try:
        read(folder)
    except (ModelError, ConfigError) as error:
        return str(error)
    return None


def assert_one_line(said: str, folder: Path) -> None:
    assert "\n" not in said
    assert len(said) < 700
    assert str(folder) in said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(build("llama"), tmp_path / "model"))


def change(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_of_200000_ids_is_one_line(folder: Path, name: str) -> None:
    change(folder / name, eos_token_id=[5] * 1024)
    assert refusal(folder) is None
    change(folder / name, eos_token_id=[5] * 200_000)
    assert refusal(folder) == f"{folder / name}: eos_token_id has 200000 ids; at most 1024"


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "spiral"}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "beta_fast": 3.0}},
        {"num_labels": 3, "id2label": {"0": "a"}},
    ],
    ids=str,
)
def test_transformers_adds_no_lines_of_its_own(
    folder: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    change(folder / "config.json", **fields)
    refusal(folder)
    assert caplog.messages == []
    assert logging.getLogger("transformers").level == logging.WARNING, "others' lines are their own"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_honest_folder_is_taken(architecture: str) -> None:
    assert refusal(build(architecture)) is None


@pytest.mark.parametrize("field", sorted({*ConfigFile.model_fields, "auto_map", "layer_norm_eps", "id2label"}))
def test_nonsense_in_config_json_is_one_line(folder: Path, field: str) -> None:
    original = (folder / "config.json").read_text()
    num_refused = 0
    for value in NONSENSE:
        (folder / "config.json").write_text(original)
        change(folder / "config.json", **{field: value})
        said = refusal(folder)
        if said is not None:
            num_refused += 1
            assert_one_line(said, folder)
    assert num_refused or field in ("auto_map", "layer_norm_eps", "id2label")


@pytest.mark.parametrize("field", sorted(RopeParameters.model_fields))
@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3", "dynamic"])
def test_nonsense_in_rope_parameters_is_one_line(folder: Path, field: str, rope_type: str) -> None:
    original = (folder / "config.json").read_text()
    whole = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    if rope_type == "llama3":
        whole |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for value in NONSENSE[:: 1 if rope_type == "default" else 3]:
        (folder / "config.json").write_text(original)
        change(folder / "config.json", rope_parameters={**whole, field: value})
        said = refusal(folder)
        if said is not None:
            assert_one_line(said, folder)


@pytest.mark.parametrize("field", sorted(SpecialTokens.model_fields))
def test_nonsense_in_generation_config_json_is_one_line(folder: Path, field: str) -> None:
    for value in NONSENSE:
        (folder / "generation_config.json").write_text(json.dumps({field: value}))
        said = refusal(folder)
        if said is not None:
            assert_one_line(said, folder)
            assert "generation_config.json" in said


MUST_BE_REFUSED: list[tuple[str, Any]] = [
    *(("num_hidden_layers", value) for value in each(0, -1, 10**7, 9_999, 3, "2", 2.5, True, [2])),
    *(("vocab_size", value) for value in each(0, -1, 10**12, 271, 273, "272", 1 << 24)),
    *(("hidden_size", value) for value in each(0, -32, 31, 64, 10**9, "x")),
    *(("intermediate_size", value) for value in each(0, -1, 47, 10**12)),
    *(("num_attention_heads", value) for value in each(0, -4, 3, 8, 10**9)),
    *(("num_key_value_heads", value) for value in each(0, -2, 3, 4, 10**9)),
    *(("head_dim", value) for value in each(-2, 0, 7, 16, 10**9, "8")),
    *(("max_position_embeddings", value) for value in each(0, -1, 10**12, "x", 1.5)),
    *(("rms_norm_eps", value) for value in each(float("inf"), float("nan"), 0.0, -1e-5, 1e9, "x")),
    *(("rope_parameters", {"rope_type": "default", "rope_theta": value}) for value in each(0, -1.0, "a", float("inf"))),
    *(("eos_token_id", value) for value in each("x", [1, "x"], 1.5)),
    *(("bos_token_id", value) for value in each("x", [1])),
    *(("pad_token_id", value) for value in each("x", [1])),
    *(("torch_dtype", value) for value in each(5, "int8", "Tensor", "", [])),
    *(("hidden_act", value) for value in each(5, "nothing")),
    *(("tie_word_embeddings", value) for value in each("yes", 1, [])),
    *(("attention_bias", value) for value in each("yes", True)),
    *(("architectures", value) for value in each([], [5], "LlamaForCausalLM2", {})),
]


@pytest.mark.parametrize(("field", "value"), MUST_BE_REFUSED, ids=lambda value: str(value)[:40])
def test_what_no_model_has_is_refused(folder: Path, field: str, value: Any) -> None:
    if field == "torch_dtype":
        config = json.loads((folder / "config.json").read_text())
        config.pop("dtype", None)
        (folder / "config.json").write_text(json.dumps(config))
    change(folder / "config.json", **{field: value})
    said = refusal(folder)
    assert said is not None or (field, value) in [("torch_dtype", ""), ("architectures", [])]  # as if left out
    if said is not None:
        assert_one_line(said, folder)


UNCLEAR: list[tuple[str, Any, str]] = [
    ("id2label", 5, "id2label 5 cannot be read"),
    ("id2label", {"a": "b"}, "id2label {'a': 'b'} cannot be read"),
    ("rope_parameters", {"full_attention": {}}, "rope_parameters should be those of all layers"),
    ("torch_dtype", "float8", "torch_dtype 'float8' is not supported; supported are float32"),
    ("eos_token_id", "x", "config.json: eos_token_id should be a valid integer, not 'x'"),
]


@pytest.mark.parametrize(("field", "value", "clear"), UNCLEAR, ids=str)
def test_an_error_names_the_field_and_what_is_wrong(folder: Path, field: str, value: Any, clear: str) -> None:
    change(folder / "config.json", **{field: value})
    said = refusal(folder)
    assert said is not None
    assert_one_line(said, folder)
    assert clear in said


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json"]
)
def test_a_file_of_settings_that_is_too_long_is_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as stream:
        stream.truncate((16 << 20) + 1)
    assert refusal(folder) == f"{folder / name} cannot be read: it has more than 16777216 bytes"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("eos_token_id", [5, 272]), ("eos_token_id", -5), ("bos_token_id", 10**9), ("pad_token_id", 272)],
    ids=str,
)
def test_special_ids_that_the_vocabulary_lacks_are_named_and_not_used(
    folder: Path, name: str, field: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder / name, **{field: value})
    assert refusal(folder) is None
    unused = 272 if isinstance(value, list) else value
    assert caplog.messages == [f"{folder / name}: {field} {unused} not used: vocab_size is 272"]
    assert not {272, -5} & set(read_model_config(folder).eos_token_ids)


# Safetensors.


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_file(file: Path, header: str | bytes, body: bytes) -> None:
    encoded = header.encode() if isinstance(header, str) else header
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + body)


def with_entry(**changes: Any) -> Spoil:
    """Change the entry of one tensor."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        header, body = header_of(file)
        header["model.norm.weight"] |= changes
        write_file(file, json.dumps(header), body)

    return spoil


def with_header(text: Any) -> Spoil:
    return lambda folder: write_file(folder / "model.safetensors", text, bytes(64))


def with_length(length: int) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])

    return spoil


def overlapping(folder: Path) -> None:
    """Two tensors share their bytes; the file is as long as before."""
    file = folder / "model.safetensors"
    header, body = header_of(file)
    names = [name for name in header if name.endswith("layernorm.weight")]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    write_file(file, json.dumps(header), body)


def with_hole(folder: Path) -> None:
    file = folder / "model.safetensors"
    header, body = header_of(file)
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 4 for offset in entry["data_offsets"]]
    write_file(file, json.dumps(header), bytes(4) + body)


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"x")


def twice(folder: Path) -> None:
    """Two files without an index hold the same tensors."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")


def replaced(name: str, make: Callable[[Path], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil


def renamed_to_nowhere(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "other.safetensors").symlink_to(folder / "nowhere")


HEADERS: list[Spoil] = [
    *map(
        with_header,
        ["[]", "5", "null", '"x"', "{", "{}", DEEP, '{"a":' * 50_000, b"\xff\xfe", '{"a": 5}', '{"a": {}}', "NaN"],
    ),
    *map(with_header, ['{"__metadata__": 5}', '{"__metadata__": {}}', '{"a": {"dtype": "F32"}}']),
    *(
        with_entry(data_offsets=value)
        for value in each([], [0], [0, 1, 2], "x", None, {}, ["a", "b"], [0.5, 1], [True, 4])
    ),
    *(with_entry(data_offsets=value) for value in each([-4, 124], [128, 0], [0, 10**30], [2**64, 2**64 + 128])),
    *(
        with_entry(shape=value)
        for value in each(None, "x", 32, [-32], [0], [2**62, 2**62], [32, 1], ["32"], [[32]], [1] * 99)
    ),
    *(with_entry(dtype=value) for value in each(None, 5, "", "F31", "I32", "U8", ["F32"], "BOOL")),
    *map(with_length, [0, 1, 7, 2**63, 2**64 - 1, 10**6]),
    *(overlapping, with_hole, longer, twice, renamed_to_nowhere),
    replaced("model.safetensors", lambda path: path.symlink_to(path.parent / "nowhere")),
    replaced("model.safetensors", lambda path: path.symlink_to(path)),
    replaced("model.safetensors", lambda path: path.mkdir()),
    replaced("model.safetensors", os.mkfifo),
    replaced("model.safetensors", lambda path: path.write_bytes(b"\0" * 8)),
    replaced("model.safetensors", lambda path: path.write_bytes(b"PK\3\4" + bytes(200))),
]


@pytest.mark.parametrize("spoil", HEADERS, ids=range(len(HEADERS)))
def test_a_file_that_lies_about_itself_is_refused(folder: Path, spoil: Spoil) -> None:
    spoil(folder)
    said = refusal(folder)
    assert said is not None
    assert_one_line(said, folder)
    assert ".safetensors" in said


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_file_that_is_half_written_is_refused_at_any_length(folder: Path, name: str) -> None:
    if name == "model.safetensors.index.json":
        names = [tensor for tensor in header_of(folder / "model.safetensors")[0] if tensor != "__metadata__"]
        (folder / name).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    content = (folder / name).read_bytes().rstrip(b"\n")
    assert refusal(folder) is None
    near = {0, *range(1, 12), *range(len(content) - 12, len(content))}
    if name == "model.safetensors":
        end = 8 + struct.unpack("<Q", content[:8])[0]
        near |= {end - 1, end, end + 1}
    for length in sorted(near | {part * len(content) // 50 for part in range(50)}):
        (folder / name).write_bytes(content[:length])
        said = refusal(folder)
        assert said is not None, f"{length} of {len(content)} bytes were taken"
        assert_one_line(said, folder)
        assert name in said


def test_a_file_of_holes_is_not_believed(folder: Path) -> None:
    """File as long as its header promises, and larger than any memory."""
    size = 4 << 40
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    write_file(folder / "model.safetensors", json.dumps({"lm_head.weight": entry}), b"")
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size + size)
    said = refusal(folder)
    assert said is not None
    assert "num_hidden_layers is 2 in config.json, and the files have 1 tensors in all" in said


# Indexes.

INDEXES = [
    *("{}", "[]", "null", "{", DEEP, '{"weight_map": 5}', '{"weight_map": []}', '{"weight_map": null}'),
    *('{"weight_map": {"a": 5}}', '{"weight_map": {"a": null}}', '{"weight_map": {"a": ["model.safetensors"]}}'),
    *('{"weight_map": {"a": ""}}', '{"weight_map": {"a": "."}}', '{"weight_map": {"a": ".."}}'),
    *('{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": "config.json"}}'),
    '{"weight_map": {"a": "no\\u0000.safetensors"}}',
    json.dumps({"weight_map": {"a": "x" * 300 + ".safetensors"}}),
]


@pytest.mark.parametrize("text", INDEXES, ids=range(len(INDEXES)))
def test_an_index_that_lies_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    said = refusal(folder)
    assert said is not None
    assert_one_line(said, folder)


def test_an_index_that_is_a_dangling_link_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").symlink_to(folder / "nowhere")
    assert "link to nowhere" in (refusal(folder) or "")


# Whole files.


@pytest.mark.parametrize("name", ["config.json", *JSON_FILES])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text(DEEP),
        lambda path: path.write_text('{"a":' * 50_000),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("{"),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text('{"a": ' + "9" * 10_000 + "}"),
        lambda path: path.symlink_to(path.parent / "nowhere"),
        lambda path: path.symlink_to(path),
        lambda path: path.mkdir(),
        os.mkfifo,
    ],
    ids=["deep", "deep objects", "list", "cut", "bytes", "digits", "dangling", "loop", "folder", "pipe"],
)
def test_a_file_that_cannot_be_read_is_named(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    said = refusal(folder)
    assert said is not None
    assert_one_line(said, folder)
    assert name in said


# Tokenizers.


def with_tokenizer(*path: str | int, value: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        place = content
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return spoil


TOKENIZERS: list[Spoil] = [
    *(with_tokenizer("model", value=value) for value in each(None, 5, [], {}, {"type": "BPE"})),
    *(
        with_tokenizer("model", "vocab", value=value)
        for value in each(None, 5, [], {"a": "x"}, {"a": -1}, {"a": 10**12})
    ),
    *(with_tokenizer("model", "vocab", value=value) for value in each({"a": 1.5}, {"a": None}, {"a": True}, [[]], [5])),
    *(with_tokenizer("model", "merges", value=value) for value in each(5, [5], [["a"]], [["q", "zz"]], {})),
    *(with_tokenizer("model", "type", value=value) for value in each(None, 5, "Nothing", [])),
    *(with_tokenizer("added_tokens", value=value) for value in each(5, [5], [{}], [{"id": "x", "content": "y"}], "x")),
    with_tokenizer("added_tokens", value=[{"id": 10**9, "content": "y", "special": True}]),
    *(with_tokenizer("pre_tokenizer", value=value) for value in each(5, [], {"type": "Nothing"})),
    *(with_tokenizer("normalizer", value=value) for value in each(5, [], {"type": "Nothing"})),
    *(
        with_tokenizer("post_processor", value=value)
        for value in each(5, "x", {"type": "Sequence"}, {"type": "Nothing"})
    ),
    with_tokenizer(
        "post_processor",
        value={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"a": {"id": "a", "ids": [float("inf")], "tokens": ["a"]}},
        },
    ),
    lambda folder: change(folder / "tokenizer_config.json", add_bos_token=True, bos_token="no such token"),
    lambda folder: change(folder / "tokenizer_config.json", add_bos_token=True, bos_token=["x"]),
    lambda folder: change(folder / "tokenizer_config.json", add_bos_token=True, bos_token={"content": {}}),
]


@pytest.mark.parametrize("spoil", TOKENIZERS, ids=range(len(TOKENIZERS)))
def test_a_tokenizer_that_lies_is_refused(folder: Path, spoil: Spoil) -> None:
    spoil(folder)
    said = refusal(folder)
    assert said is not None
    assert_one_line(said, folder)
    assert "tokenizer" in said


FAR = {"id": "far", "ids": [271, 5000], "tokens": ["x", "far"]}
ADDED: list[dict[str, Any]] = [
    {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "far", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"far": FAR},
    },
    {"type": "RobertaProcessing", "sep": ["x", 5000], "cls": ["y", 1], "trim_offsets": True, "add_prefix_space": True},
    {"type": "BertProcessing", "sep": ["x", 2], "cls": ["y", 5000]},
]


@pytest.mark.parametrize("is_in_sequence", [False, True])
@pytest.mark.parametrize("processor", ADDED, ids=range(len(ADDED)))
def test_an_id_without_a_row_is_refused_wherever_it_is_put_into_a_text(
    folder: Path, processor: dict[str, Any], is_in_sequence: bool
) -> None:
    value = {"type": "Sequence", "processors": [processor]} if is_in_sequence else processor
    with_tokenizer("post_processor", value=value)(folder)
    assert refusal(folder) == (
        f"{folder / 'tokenizer.json'} has token id 5000 in its post_processor; the model has only 272 rows"
    )


# What is compared with what.


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "fields", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
def test_the_shapes_that_are_checked_are_those_that_are_loaded(architecture: str, fields: dict[str, Any]) -> None:
    if fields.get("mlp_bias") and architecture != "llama":
        fields = {}
    folder = build(architecture, **fields)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    config = read_model_config(folder)
    assert {name: target.shape for name, target in checkpoint_targets(config).items()} == stored
    sharded = [part_of_two(config, rank) for rank in range(2)]
    assert all({name: target.shape for name, target in part.items()} == stored for part in sharded)
    for name, shape in stored.items():
        assert sum(part[name].num_values for part in sharded) >= math.prod(shape), name


def part_of_two(config: ModelConfig, rank: int) -> dict[str, WeightTarget]:
    ranks: Any = SimpleNamespace(shard=Shard(rank, 2))
    return weight_targets(Decoder(config, dtype=config.dtype, device=torch.device("meta"), communicator=ranks))


def test_weights_that_no_memory_holds_are_refused_before_they_are_made(folder: Path) -> None:
    """No files to compare with, as with the load format dummy."""
    change(folder / "config.json", hidden_size=1 << 20, intermediate_size=1 << 24, num_hidden_layers=9, head_dim=8)
    with pytest.raises(ModelError, match=r"the weights that config\.json asks for take .* GiB"):
        ModelRunner.load(folder, page_size=4, num_pages=8, load_format="dummy")
    config = read_model_config(build("llama"))
    check_weights_fit(config, config.dtype, torch.device("cpu"), Shard())
