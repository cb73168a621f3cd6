"""Reading model folders: every layout that is valid, and a clear error for every one that is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ModelError
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.layers.attention import Attention
from outrider.model_executor.layers.feed_forward import GatedMlp
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import build, reference_logits

TEXT = [5, 6, 7, 8]


def load(folder: Path, **settings: Any) -> ModelRunner:
    return ModelRunner.load(folder, page_size=4, num_pages=8, **settings)


def logits_of(folder: Path) -> torch.Tensor:
    runner = load(folder)
    return runner.forward([ForwardRow(runner.sequences.open(8), TEXT, len(TEXT))]).clone()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of one's own to spoil."""
    return Path(shutil.copytree(build("llama"), tmp_path / "model"))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shard(folder: Path) -> None:
    """Split the one file in two with an index, so that parts of one fused weight lie in both."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_with_an_index(folder: Path) -> None:
    shard(folder)
    torch.testing.assert_close(logits_of(folder), reference_logits(build("llama"), TEXT), atol=1e-4, rtol=0)


def test_a_single_file_of_another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    torch.testing.assert_close(logits_of(folder), reference_logits(build("llama"), TEXT), atol=1e-4, rtol=0)


def test_weights_saved_in_another_type_are_converted(folder: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    change_tensors(folder, halve)
    runner = load(folder, dtype="float32")
    logits = runner.forward([ForwardRow(runner.sequences.open(8), TEXT, len(TEXT))])
    difference = (logits - reference_logits(build("llama"), TEXT)).abs().max()
    assert 0 < difference < 0.1


def test_dtype_auto_is_the_type_on_file(folder: Path) -> None:
    change_json(folder / "config.json", dtype="bfloat16")
    assert load(folder).dtype == torch.bfloat16


def test_progress_counts_every_byte_once(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    expected = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (expected, expected)
    assert {total for _, total in calls} == {expected}


def test_a_copy_of_a_tied_head_and_old_rope_buffers_are_ignored(tmp_path: Path) -> None:
    source = build("llama", tie_word_embeddings=True)
    folder = Path(shutil.copytree(source, tmp_path / "model"))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    change_tensors(folder, add)
    torch.testing.assert_close(logits_of(folder), reference_logits(source, TEXT), atol=1e-4, rtol=0)


def test_loading_keeps_no_second_copy_of_packed_weights() -> None:
    folder = build("llama", hidden_size=192, intermediate_size=1400, head_dim=48)
    decoder = load(folder).worker.model
    for layer in decoder.layers:
        mlp = layer.feed_forward
        assert isinstance(mlp, GatedMlp)
        assert isinstance(layer.attention, Attention)
        for linear in (layer.attention.qkv, layer.attention.output, mlp.gate_up, mlp.down):
            assert linear.method.parameters()["weight"].tensor.numel() == 0


def spoil_truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def spoil_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def spoil_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    )


def spoil_gguf(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-Q4_K_M.gguf")


def spoil_gguf_alone(folder: Path) -> None:
    spoil_gguf(folder)
    (folder / "config.json").unlink()


def spoil_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def spoil_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "part-1.safetensors").unlink()


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def spoil_index_outside(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')


def spoil_missing_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: [tensors.pop(f"model.layers.1.mlp.{n}_proj.weight") for n in ("up", "gate")])


def spoil_shape(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))


def spoil_tensor_type(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))


def spoil_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "config.json", **changes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_truncate, r"model\.safetensors is truncated: it has \d+ bytes and its header promises \d+"),
        (spoil_garbage, r"model\.safetensors is truncated or no safetensors file"),
        (spoil_empty, r"model\.safetensors is truncated or no safetensors file"),
        (spoil_pointer, r"model\.safetensors is a pointer of Git LFS: fetch what it points to, with git lfs pull"),
        (spoil_gguf, r"no other \*\.safetensors; model-Q4_K_M\.gguf is a GGUF file, which is not read"),
        (spoil_gguf_alone, r"model-Q4_K_M\.gguf is a GGUF file, which is not read: give a folder with config\.json"),
        (spoil_no_weights, r"has no model\.safetensors, no model\.safetensors\.index\.json"),
        (spoil_missing_shard, r"part-1\.safetensors is missing, and model\.safetensors\.index\.json names it"),
        (spoil_index, r"model\.safetensors\.index\.json is no index"),
        (spoil_index_outside, r"names '\.\./elsewhere\.safetensors', which is not a file beside it"),
        (spoil_missing_tensor, r"tensor model\.layers\.1\.mlp\.gate_proj\.weight and 1 more are missing"),
        (spoil_shape, r"model\.norm\.weight has shape \[31\]; config\.json asks for \[32\]"),
        (spoil_tensor_type, r"model\.norm\.weight is of type I8; supported are F64, F32, F16, BF16"),
        (
            spoil_config(architectures=["GemmaForCausalLM"]),
            r"decoder of model_type llama is LlamaForCausalLM, not \['GemmaForCausalLM'\]",
        ),
        (
            spoil_config(architectures=None, model_type="gpt2"),
            r"through transformers: tensor transformer\.h\.0\..* missing",
        ),
        (
            spoil_config(architectures=None, model_type="mamba"),
            r"layers of type linear_attention are not supported through transformers",
        ),
        (spoil_config(hidden_act="nothing"), r"hidden_act 'nothing' is not supported"),
        (
            spoil_config(quantization_config={"bits": 4}),
            r"quantization_config has no quant_method; supported are FP8",
        ),
        (spoil_config(num_hidden_layers="two"), r"num_hidden_layers should be a valid integer, not 'two'"),
        (
            spoil_config(rope_parameters={"rope_type": "axial", "rope_theta": 1e4}),
            r"rope type 'axial' is not supported; supported are default, linear",
        ),
        (
            spoil_config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 3,
                }
            ),
            r"long_factor should have 4 numbers, and has 3",
        ),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
        (
            lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{"),
            r"config\.json is not JSON in UTF-8: byte 0 does not fit$",
        ),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json holds no JSON object"),
        (shutil.rmtree, r"is not a folder"),
    ],
)
def test_a_spoilt_folder_is_refused_with_the_reason(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        load(folder / "config.json")
    file = (folder / "config.json").rename(folder / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf is a GGUF file, which is not read: give a folder"):
        load(file)


@pytest.mark.parametrize(("architecture", "says"), [("mistral3", True), ("llama", False)])
def test_a_model_of_images_says_that_text_is_served(
    architecture: str, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ModelRunner.load(build(architecture), num_pages=8)
    said = [message for message in caplog.messages if "images and sound are refused" in message]
    assert len(said) == says
