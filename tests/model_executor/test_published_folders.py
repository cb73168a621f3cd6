"""Folders as they are published: what a model does not need is named in one warning, what it needs is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ModelError
from outrider.model_executor.models import read_model_config
from tests.model_executor.parity import build, reference_logits
from tests.model_executor.test_loading import TEXT, change_json, change_tensors, load, logits_of, shard

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def write_index(folder: Path, **weight_map: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def add_tensors(*names: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(3) for name in names}))

    return add


def index_missing_shards(folder: Path) -> None:
    write_index(folder, **dict.fromkeys(load_file(folder / SINGLE), "model-00001-of-00002.safetensors"))


def index_absent_head(folder: Path) -> None:
    write_index(folder, **dict.fromkeys([*load_file(folder / SINGLE), "lm_head.weight"], SINGLE))


def index_head_in_missing_shard(folder: Path) -> None:
    shard(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, **weight_map, **{"lm_head.weight": "part-2.safetensors"})


def store_only_the_head(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))


def keep_old_copies(folder: Path) -> None:
    """Tensors that the index finds in one file have another value in the other."""
    shard(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, file in list(weight_map.items())[:4]:
        other = folder / ("part-1.safetensors" if file == "part-0.safetensors" else "part-0.safetensors")
        tensors = load_file(other)
        save_file({**tensors, name: torch.zeros_like(load_file(folder / file)[name])}, other)


def add_unknown_types(folder: Path) -> None:
    unknown = {"x.scale": torch.ones(4).to(torch.float8_e8m0fnu), "x.freqs": torch.ones(4, dtype=torch.complex64)}
    change_tensors(folder, lambda tensors: tensors.update(unknown))


def drop_a_layer(folder: Path) -> None:
    change_json(folder / "config.json", num_hidden_layers=1)


UNTIED: list[tuple[Callable[[Path], None], str | None]] = [
    (index_missing_shards, None),
    (write_index, None),
    (lambda folder: write_index(folder, a="gone.safetensors"), "tensor a is not used"),
    (add_tensors("v_head.summary.weight"), "tensor v_head.summary.weight is not used"),
    (add_tensors("v_head.summary.weight", "score.weight"), "and 1 more are not used"),
    (add_tensors("model.layers.0.self_attn.q_proj.bias"), "q_proj.bias is not used"),
    (keep_old_copies, None),
    (add_unknown_types, "and 1 more are not used"),
    (drop_a_layer, "and 8 more are not used"),
]
TIED: list[tuple[Callable[[Path], None], str | None]] = [
    (index_absent_head, None),
    (index_head_in_missing_shard, None),
    (store_only_the_head, None),
]


@pytest.mark.parametrize(
    ("is_tied", "change", "warning"),
    [*((False, *case) for case in UNTIED), *((True, *case) for case in TIED)],
)
def test_a_published_folder_is_served_as_transformers_has_it(
    tmp_path: Path,
    is_tied: bool,
    change: Callable[[Path], None],
    warning: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = Path(shutil.copytree(build("llama", tie_word_embeddings=is_tied), tmp_path / "model"))
    change(folder)
    found = logits_of(folder)
    assert len(caplog.messages) == (warning is not None)
    assert (warning or "") in "".join(caplog.messages)
    reference = build("llama", tie_word_embeddings=is_tied)
    if change is drop_a_layer:
        reference = Path(shutil.copytree(reference, tmp_path / "reference"))
        drop_a_layer(reference)
    torch.testing.assert_close(found, reference_logits(reference, TEXT), atol=1e-4, rtol=0)


def test_a_shard_that_the_model_needs_is_named_by_the_index(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build("llama"), tmp_path / "model"))
    tensors = load_file(folder / SINGLE)
    name = "model.norm.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, folder / SINGLE)
    write_index(folder, **dict.fromkeys(tensors, SINGLE))
    with pytest.raises(ModelError, match=rf"{INDEX} says that tensor {name} is in {SINGLE}, and it is not"):
        load(folder)


def test_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(build("llama"), tmp_path / "model"))
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
        load(folder)


def store_another_head(folder: Path) -> None:
    head = 0.3 * torch.randn(272, 32, generator=torch.Generator().manual_seed(5))
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))


def test_a_head_on_file_that_differs_from_the_tied_embedding_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Same as in transformers; one that is a copy of the embedding changes nothing."""
    folder = Path(shutil.copytree(build("llama", tie_word_embeddings=True), tmp_path / "model"))
    store_another_head(folder)
    torch.testing.assert_close(logits_of(folder), reference_logits(folder, TEXT), atol=1e-4, rtol=0)
    assert "the head on file is another than the embedding: used" in "".join(caplog.messages)
    tied = logits_of(build("llama", tie_word_embeddings=True))
    assert (logits_of(folder) - tied).abs().max() > 0.1
    copy_of_embedding = shutil.copytree(build("llama", tie_word_embeddings=True), tmp_path / "copy")
    change_tensors(
        copy_of_embedding, lambda named: named.update({"lm_head.weight": named["model.embed_tokens.weight"].clone()})
    )
    torch.testing.assert_close(logits_of(copy_of_embedding), tied)


def test_a_text_part_that_does_not_say_whether_it_is_tied_has_the_default_of_its_own_type(tmp_path: Path) -> None:
    """Mistral Small 3.1 is published so: its head is one of its own."""
    source = build("mistral3", tie_word_embeddings=False)
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert not read_model_config(folder).tied_embeddings
    torch.testing.assert_close(logits_of(folder), reference_logits(source, TEXT), atol=1e-4, rtol=0)
