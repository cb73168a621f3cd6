"""Tokenizer files: special tokens, templates and settings."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ModelError
from outrider.model_executor.loader.tokenizer_files import read_tokenizer, tokenizer_hash
from tests.support.tiny_models import build_tiny_model

TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "unk_token": None},
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "added_tokens": [
        {"id": 5, "content": "<s>", "special": True, "normalized": False},
        {"id": 4, "content": "</s>", "special": True, "normalized": False},
    ],
}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
}


def write(folder: Path, tokenizer: dict[str, Any], settings: dict[str, Any] | None = None) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def changed(**entries: Any) -> dict[str, Any]:
    return {**copy.deepcopy(TOKENIZER), **entries}


def test_a_real_folder(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model", vocab_size=300)
    facts = read_tokenizer(folder, vocab_size=300)
    assert facts.num_token_ids == 257
    assert facts.bos_token_id is None
    assert facts.files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert "tokenizer_config.json" in facts.files
    assert len(facts.sha256) == 64


def test_ids_count_added_tokens_and_those_without_a_row_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, TOKENIZER) / "tokenizer.json"
    assert read_tokenizer(tmp_path, vocab_size=6).num_token_ids == 6
    assert caplog.messages == []
    assert read_tokenizer(tmp_path, vocab_size=2).num_token_ids == 2
    assert caplog.messages == [f"{path}: token 'ab' and 2 more not used: the model has only 2 rows"]


@pytest.mark.parametrize("is_in_vocabulary", [False, True])
def test_added_tokens_may_have_more_ids_than_the_model(
    tmp_path: Path, is_in_vocabulary: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = changed()
    if is_in_vocabulary:
        tokenizer["model"]["vocab"]["<s>"] = 5
    path = write(tmp_path, tokenizer) / "tokenizer.json"
    assert read_tokenizer(tmp_path, vocab_size=5).num_token_ids == 5
    assert caplog.messages == [f"{path}: token '<s>' not used: the model has only 5 rows"]
    write(tmp_path, {**tokenizer, "post_processor": TEMPLATE})
    with pytest.raises(ModelError, match="token id 5 in its post_processor"):
        read_tokenizer(tmp_path, vocab_size=5)


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    facts = read_tokenizer(tmp_path, vocab_size=5)
    assert (facts.num_token_ids, facts.sha256, facts.files) == (0, "", {})


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_broken_files_are_model_errors(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path, vocab_size=5)


@pytest.mark.parametrize(
    ("processor", "settings", "expected"),
    [
        (None, {}, None),
        (TEMPLATE, {}, 5),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE]}, {}, 5),
        (TEMPLATE, {"add_bos_token": False}, None),
        (None, {"add_bos_token": True, "bos_token": "<s>"}, 5),
        (None, {"add_bos_token": True, "bos_token": {"content": "<s>"}}, 5),
        ({**TEMPLATE, "single": [{"Sequence": {"id": "A", "type_id": 0}}]}, {}, None),
    ],
)
def test_the_id_put_first(tmp_path: Path, processor: Any, settings: dict[str, Any], expected: int | None) -> None:
    write(tmp_path, changed(post_processor=processor), settings)
    assert read_tokenizer(tmp_path, vocab_size=6).bos_token_id == expected


def test_the_hash_looks_through_layout() -> None:
    older = changed(
        model={"merges": ["a b"], "vocab": {"ab": 2, "b": 1, "a": 0}, "type": "BPE"},
        added_tokens=list(reversed(TOKENIZER["added_tokens"])),
        decoder={"type": "ByteLevel"},
        post_processor=TEMPLATE,
    )
    del older["normalizer"]
    assert tokenizer_hash(older) == tokenizer_hash(TOKENIZER)


@pytest.mark.parametrize(
    "entries",
    [
        {"model": {**TOKENIZER["model"], "vocab": {"a": 1, "b": 0, "ab": 2}}},
        {"model": {**TOKENIZER["model"], "merges": []}},
        {"model": {**TOKENIZER["model"], "unk_id": 0}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"added_tokens": TOKENIZER["added_tokens"][:1]},
        {"added_tokens": [{**token, "lstrip": True} for token in TOKENIZER["added_tokens"]]},
    ],
)
def test_the_hash_sees_what_decides_ids(entries: dict[str, Any]) -> None:
    assert tokenizer_hash(changed(**entries)) != tokenizer_hash(TOKENIZER)


def test_merges_are_compared_in_order() -> None:
    model = {**TOKENIZER["model"], "merges": [["a", "b"], ["b", "a"]]}
    swapped = {**model, "merges": model["merges"][::-1]}
    assert tokenizer_hash(changed(model=model)) != tokenizer_hash(changed(model=swapped))
