"""The layers of a target that its draft head reads, before either is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.preparation import prepare_stack
from outrider.config import Settings, TargetSettings, load, load_all
from outrider.demo import DFLASH, DRAFT, EAGLE3, TARGET
from outrider.errors import ConfigError
from outrider.model_executor.draft_heads.config import read_eagle3_config
from outrider.model_executor.draft_heads.dflash_config import read_dflash_config
from outrider.process.head_layers import with_layers_of_folder, with_layers_of_head

EIGHT_LAYERS = {"num_hidden_layers": 8}
NAMED = {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}


def settings(target: Path, draft: Path | None, **more: str) -> Settings:
    given: dict[tuple[str, str], Any] = {("target", "model"): str(target), ("draft", "method"): "none"}
    if draft is not None:
        given |= {("draft", "model"): str(draft), ("draft", "method"): "eagle3"}
    named = {tuple(place.split(".")): value for place, value in more.items()}
    return load_all({**given, **named}, environ={}).settings  # type: ignore[dict-item]


def folder(path: Path, config: Mapping[str, Any] | str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("target", "head", "layers"),
    [
        (EIGHT_LAYERS, {}, "2,4,5"),
        (EIGHT_LAYERS, NAMED, "1,4,8"),
        (EIGHT_LAYERS, {"eagle_config": NAMED}, "1,4,8"),
        ({"text_config": EIGHT_LAYERS}, {}, "2,4,5"),
        (EIGHT_LAYERS, {"eagle_aux_hidden_state_layer_ids": [1, 9]}, None),
        (EIGHT_LAYERS, {"eagle_aux_hidden_state_layer_ids": "1"}, None),
        (EIGHT_LAYERS, "{", "2,4,5"),
        ({}, {}, None),
    ],
)
def test_the_targets_graphs_hand_out_what_an_eagle3_head_reads(
    tmp_path: Path, target: Mapping[str, Any], head: Mapping[str, Any] | str, layers: str | None
) -> None:
    given = settings(folder(tmp_path / "target", target), folder(tmp_path / "head", head))
    assert with_layers_of_head(given).target.hidden_state_layers == layers


@pytest.mark.parametrize("method", ["eagle", "mtp", "medusa", "mlp_speculator"])
def test_other_heads_read_what_the_targets_own_head_reads(method: str) -> None:
    given = settings(TARGET, EAGLE3, **{"draft.method": method})
    assert with_layers_of_head(given).target.hidden_state_layers == "-1"


def test_layers_that_are_set_stay_and_other_drafts_read_none() -> None:
    given = settings(TARGET, EAGLE3, **{"target.hidden_state_layers": "1"})
    assert with_layers_of_head(given) == given
    assert with_layers_of_head(settings(TARGET, None)).target.hidden_state_layers is None
    small = settings(TARGET, DRAFT, **{"draft.method": "draft_model"})
    assert with_layers_of_head(small).target.hidden_state_layers is None


def test_a_stack_with_a_head_captures_the_layers_that_it_reads() -> None:
    read = read_eagle3_config(EAGLE3, TARGET).hidden_state_layers
    effective = load_all(
        {
            ("target", "model"): str(TARGET),
            ("draft", "model"): str(EAGLE3),
            ("target", "device"): "cpu",
            ("draft", "device"): "cpu",
            ("coordinator", "port"): hold_port(),
        },
        environ={},
    )
    captured = load(TargetSettings, prepare_stack(effective).models[0].argv, {}).hidden_state_layers
    assert captured is not None
    assert sorted(map(int, captured.split(","))) == sorted(read)


@pytest.mark.parametrize(
    ("drafter", "layers"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 5, 7]}}, "2,6,-1"),
        ({"dflash_config": {}, "num_hidden_layers": 3}, "2,4,6"),
        ({"dflash_config": {}, "num_hidden_layers": 1}, "5"),
        ({"aux_hidden_state_layer_ids": [2, 8], "transformer_layer_config": {}}, "2,-1"),
        ({"transformer_layer_config": {"num_hidden_layers": 2}}, "2,6"),
        ({"dflash_config": {"target_layer_ids": [8]}}, None),
        ({"dflash_config": {}, "num_hidden_layers": 10**9}, None),
        ({}, None),
    ],
)
def test_the_targets_graphs_hand_out_what_a_dflash_drafter_reads(
    tmp_path: Path, drafter: Mapping[str, Any], layers: str | None
) -> None:
    given = settings(
        folder(tmp_path / "target", EIGHT_LAYERS), folder(tmp_path / "head", drafter), **{"draft.method": "dflash"}
    )
    assert with_layers_of_head(given).target.hidden_state_layers == layers


@pytest.mark.parametrize(
    ("method", "head", "layers"),
    [
        ("eagle3", NAMED, "1,4,8"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 5, 7]}}, "2,6,-1"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [9]}, None),
    ],
)
def test_a_target_reads_the_layers_in_the_folder_of_a_head(
    tmp_path: Path, method: str, head: Mapping[str, Any], layers: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model, named = folder(tmp_path / "target", EIGHT_LAYERS), folder(tmp_path / "head", head)
    given = load(TargetSettings, ["--model", str(model), f"--hidden-state-layers={method}:{named}"], {})
    assert with_layers_of_folder(given).hidden_state_layers == layers
    assert [str(named) in told for told in caplog.messages] == [True] * (layers is None)


def test_numbers_of_layers_stay_and_other_words_are_refused() -> None:
    given = load(TargetSettings, ["--model", str(TARGET), "--hidden-state-layers=1,-1"], {})
    assert with_layers_of_folder(given) is given
    with pytest.raises(ConfigError, match="eagle3:/models/head"):
        load(TargetSettings, ["--model", str(TARGET), "--hidden-state-layers=medusa:/models/head"], {})


def test_the_layers_of_the_embedded_drafter_are_those_that_it_reads() -> None:
    found = with_layers_of_head(settings(TARGET, DFLASH, **{"draft.method": "dflash"})).target.hidden_state_layers
    assert found == ",".join(map(str, read_dflash_config(DFLASH, TARGET).hidden_state_layers))
