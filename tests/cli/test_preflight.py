"""What `outrider serve` sees in two folders before it starts anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli.stack.preflight import check_model_folder, check_tokenizers
from outrider.errors import ModelError, PairMismatchError
from outrider.vocabularies import tokens_by_id

VOCAB = {"a": 0, "b": 1}


def folder(parent: Path, name: str, vocab: dict[str, int] | None, **more: object) -> Path:
    path = parent / name
    path.mkdir()
    if vocab is not None:
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, **more}), encoding="utf-8")
    return path


def test_other_tokens_under_the_same_ids_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    target, draft = folder(tmp_path, "large", VOCAB), folder(tmp_path, "small", {"aa": 0, "b": 1})
    words = "draft small and the target large differ: 2 and 2 tokens, 1 ids differ, .* 'aa' in the draft and 'a' in the"
    with pytest.raises(PairMismatchError, match=words):
        check_tokenizers(target, draft)


def test_the_same_ids_by_other_rules_are_left_to_the_services(tmp_path: Path) -> None:
    target = folder(tmp_path, "target", VOCAB)
    check_tokenizers(target, folder(tmp_path, "draft", VOCAB, normalizer={"type": "NFC"}))
    check_tokenizers(target, folder(tmp_path, "without", None))
    broken = folder(tmp_path, "broken", None)
    (broken / "tokenizer.json").write_text("{", encoding="utf-8")
    check_tokenizers(target, broken)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_text("[" * 100_000), "nested too deeply"),
        (lambda path: path.write_text("{"), "cannot be read"),
        (os.mkfifo, "is no regular file"),
        (lambda path: path.mkdir(), "is no regular file"),
    ],
    ids=["deep", "cut", "pipe", "folder"],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(ModelError, match=rf"target model: .*config\.json.* {said}"):
        check_model_folder(tmp_path, "target", needs_tokenizer=False)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"[]", b"5", b'{"model": {"vocab": {"a": "x"}}}', b'{"model": {"vocab": {"a": 1.5}}}']
)
def test_a_tokenizer_that_cannot_be_read_is_left_to_the_services(content: bytes) -> None:
    assert tokens_by_id(content) == {}
