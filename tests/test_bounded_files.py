"""Files of model folders: what links may name, and what is read at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.errors import ConfigError, ModelError
from outrider.limits.bounded_files import read_bounded, read_of_folder
from outrider.model_executor.loader.checkpoint import read_checkpoint
from outrider.model_executor.loader.tokenizer_files import read_tokenizer
from outrider.model_executor.models import read_model_config
from outrider.tokenization import ModelText
from outrider.tokenization.chat.templates import TEMPLATE_FILE
from outrider.tokenization.model_text import JSON_FILES, read_text_files
from tests.support.tiny_models import cached_tiny_model

SECRET = b'{"secret": "of this host"}'
PAIR = Path(__file__).parents[1] / "outrider" / "demo" / "pair" / "target"
PUBLISHED = (*JSON_FILES, TEMPLATE_FILE, "chat_template.json", "additional_chat_templates/rag.jinja")
Link = Callable[[Path, Path], None]


def link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def relative_link(path: Path, secret: Path) -> None:
    path.symlink_to(os.path.relpath(secret, path.parent))


def chain_of_links(path: Path, secret: Path) -> None:
    (path.parent / "between").symlink_to(secret)
    path.symlink_to(path.parent / "between")


def linked_folder(path: Path, secret: Path) -> None:
    (path.parent / "sub").symlink_to(secret.parent)
    path.symlink_to(path.parent / "sub" / secret.name)


def link_to_memory_of_the_kernel(path: Path, secret: Path) -> None:
    path.symlink_to("/proc/self/environ")


LINKS = (link, relative_link, chain_of_links, linked_folder, link_to_memory_of_the_kernel)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "host" / "secret.json"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(cached_tiny_model("llama"), folder)
    for name in PUBLISHED:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        source = PAIR / name
        path.write_bytes(source.read_bytes() if source.exists() else b"{}")
    return folder


@pytest.mark.parametrize("make", LINKS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_of_a_model_folder_is_in_it(folder: Path, secret: Path, name: str, make: Link) -> None:
    assert set(read_text_files(folder)) == set(PUBLISHED)
    (folder / name).unlink()
    make(folder / name, secret)
    with pytest.raises(ConfigError, match="outside of the model's folder"):
        read_text_files(folder)
    with pytest.raises(ModelError, match="outside of the model's folder"):
        read_tokenizer(folder, vocab_size=1 << 20)
    if name == "tokenizer.json":
        with pytest.raises(ConfigError, match="outside of the model's folder"):
            ModelText.from_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_configurations_too(folder: Path, secret: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    with pytest.raises(ModelError, match="outside of the model's folder"):
        read_model_config(folder)


def test_a_folder_of_templates_that_is_a_link_too(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder / "additional_chat_templates")
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "x.jinja").write_bytes(SECRET)
    (folder / "additional_chat_templates").symlink_to(tmp_path / "host")
    with pytest.raises(ConfigError, match="outside of the model's folder"):
        read_text_files(folder)


def test_links_within_the_folder_are_read(folder: Path) -> None:
    """Links as a ConfigMap has them."""
    (folder / "..data").mkdir()
    (folder / TEMPLATE_FILE).rename(folder / "..data" / TEMPLATE_FILE)
    (folder / TEMPLATE_FILE).symlink_to(Path("..data") / TEMPLATE_FILE)
    assert set(read_text_files(folder)) == set(PUBLISHED)
    (folder.parent / "named").symlink_to(folder)
    assert set(read_text_files(folder.parent / "named")) == set(PUBLISHED)


def test_the_cache_of_the_hub_has_links_to_its_blobs(folder: Path, tmp_path: Path, secret: Path) -> None:
    cached = tmp_path / "hub" / "models--a--b"
    (cached / "blobs").mkdir(parents=True)
    snapshot = cached / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        if path.is_file():
            shutil.copy(path, cached / "blobs" / str(number))
            (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert TEMPLATE_FILE in read_text_files(snapshot)
    read_checkpoint(snapshot, read_model_config(snapshot))
    part = snapshot / "draft"  # a repository may keep several models
    part.mkdir()
    (part / TEMPLATE_FILE).symlink_to((snapshot / TEMPLATE_FILE).resolve())
    assert TEMPLATE_FILE in read_text_files(part)
    (part / "tokenizer_config.json").symlink_to(secret)
    with pytest.raises(ConfigError, match="outside of the model's folder"):
        read_text_files(part)
    (snapshot / TEMPLATE_FILE).unlink()
    (snapshot / TEMPLATE_FILE).symlink_to(secret)
    with pytest.raises(ConfigError, match="outside"):
        read_text_files(snapshot)


def test_blobs_that_are_a_link_open_nothing(tmp_path: Path, secret: Path) -> None:
    snapshot = tmp_path / "hub" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "blobs").symlink_to(secret.parent)
    (snapshot / TEMPLATE_FILE).symlink_to(Path("../../blobs") / secret.name)
    with pytest.raises(OSError, match="outside"):
        read_of_folder(snapshot, TEMPLATE_FILE)


def test_weights_may_be_on_another_disk(folder: Path, tmp_path: Path) -> None:
    config = read_model_config(folder)
    expected = read_checkpoint(folder, config)
    disk = tmp_path / "disk"
    disk.mkdir()
    for path in folder.glob("model*.safetensors*"):
        path.rename(disk / path.name)
        path.symlink_to(disk / path.name)
    assert list(read_checkpoint(folder, config)) == list(expected)


@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "folder"])
def test_weights_end_in_regular_files(folder: Path, tmp_path: Path, target: str) -> None:
    config = read_model_config(folder)
    path = next(folder.glob("model*.safetensors"))
    path.unlink()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    path.symlink_to(tmp_path / target)
    with pytest.raises(ModelError, match=path.name):
        read_checkpoint(folder, config)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "/dev/zero", "."):
        with pytest.raises(OSError, match=r"no regular file|Is a directory"):
            read_bounded(tmp_path / name)
