"""Checks of `outrider serve` on two model folders before it starts anything."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.preflight import (
    check_files,
    check_listeners,
    check_model_folder,
    check_tokenizers,
    longest_context,
)
from outrider.config import CoordinatorSettings, DraftSettings, GatewaySettings, Settings, TargetSettings
from outrider.errors import ConfigError, ModelError, PairMismatchError
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
        (lambda path: path.write_bytes(b"\xff\xfe{"), "is not JSON in UTF-8: byte 0 does not fit"),
        (lambda path: path.write_text("[" + " " * (16 << 20)), "cannot be read: it has more than 16777216 bytes"),
        (os.mkfifo, "is no regular file"),
        (lambda path: path.mkdir(), "is no regular file"),
    ],
    ids=["deep", "cut", "no UTF-8", "long", "pipe", "folder"],
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


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ("{}", 2048),
        ('{"factor": 4.0}', 8192),
        ('{"factor": 8, "original_max_position_embeddings": 512}', 16384),
        ('{"factor": "8"}', None),
        ('{"factor": 1e999}', None),
        ('{"factor": NaN}', 2048),
    ],
)
def test_the_longest_context_is_known_where_a_config_says_it(scaling: str, expected: int | None) -> None:
    config = json.loads(f'{{"max_position_embeddings": 2048, "rope_scaling": {scaling}}}')
    assert longest_context(config) == expected


def test_the_trained_length_beside_the_scaling_counts_for_the_longest_context() -> None:
    config = {"max_position_embeddings": 2048, "original_max_position_embeddings": 4096, "rope_scaling": {"factor": 4}}
    assert longest_context(config) == 16384


def stack(coordinator: dict[str, int]) -> Settings:
    return Settings(
        target=TargetSettings.model_validate({"model": "m"}),
        draft=DraftSettings.model_validate({}),
        coordinator=CoordinatorSettings.model_validate(coordinator),
    )


@pytest.mark.parametrize("key", ["api_token_file", "chat_template"])
def test_a_file_that_cannot_be_read_is_told_before_anything_is_loaded(tmp_path: Path, key: str) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=rf"coordinator\.{key}: .*missing cannot be read: No such file"):
        check_files(CoordinatorSettings.model_validate({key: str(missing)}))
    missing.write_text("x")
    check_files(CoordinatorSettings.model_validate({key: str(missing), "trace_file": str(tmp_path / "new")}))


@pytest.mark.parametrize(
    ("coordinator", "gateway", "said"),
    [
        (
            {},
            {"port": 50050},
            "gateway.port: is 50050, as coordinator.port is: --port is the port of gRPC .* --http-port that of HTTP",
        ),
        ({"metrics_port": 8000}, {}, "coordinator.metrics_port: is 8000, as gateway.port is"),
        ({"metrics_port": 9464}, {"metrics_port": 9464}, "gateway.metrics_port: is 9464, as coordinator.metrics_port"),
        ({"health_port": 50050}, {}, "coordinator.health_port: is 50050, as coordinator.port is"),
    ],
)
def test_one_port_twice_is_told_before_anything_is_loaded(
    coordinator: dict[str, int], gateway: dict[str, int], said: str
) -> None:
    settings = stack(coordinator)
    with pytest.raises(ConfigError, match=said):
        check_listeners(settings, GatewaySettings.model_validate(gateway))


def test_a_port_of_metrics_that_is_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"coordinator.metrics_port: 127.0.0.1:{port} is in use"):
            check_listeners(stack({"metrics_port": port}), None)
    check_listeners(stack({"metrics_port": hold_port()}), GatewaySettings.model_validate({}))
