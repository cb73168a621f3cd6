"""Settings of a stack before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.stack.preparation import with_length_of_target
from outrider.config import Settings
from tests.process.test_head_layers import settings


def _given(tmp_path: Path, context: Any, **keys: Any) -> Settings:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return settings(tmp_path / "target", draft, **{"draft.method": "draft_model", **keys})


@pytest.mark.parametrize(
    ("context", "keys", "expected"),
    [
        pytest.param(4096, {"target.max_model_len": "512"}, 512, id="texts are no longer than the target's"),
        pytest.param(512, {"target.max_model_len": "512"}, 512, id="just as long"),
        pytest.param(256, {"target.max_model_len": "512"}, None, id="a draft that takes less keeps its own limit"),
        pytest.param(None, {"target.max_model_len": "512"}, None, id="a draft that does not say"),
        pytest.param(4096, {}, None, id="no limit is given"),
        pytest.param(4096, {"target.max_model_len": "512", "draft.max_model_len": "128"}, 128, id="the draft's own"),
    ],
)
def test_a_draft_makes_room_for_no_longer_texts_than_its_target(
    tmp_path: Path, context: Any, keys: dict[str, str], expected: int | None
) -> None:
    given = _given(tmp_path, context, **keys)
    found = with_length_of_target(given)
    assert found.draft.max_model_len == expected
    assert found.target == given.target


def test_a_draft_without_a_model_has_no_such_limit(tmp_path: Path) -> None:
    given = settings(tmp_path, None, **{"draft.method": "ngram", "target.max_model_len": "512"})
    assert with_length_of_target(given) == given
