"""A model that two ranks share says what it says alone, and neither rank reads or holds more than its part."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.model_executor.synthetic.recipe import Recipe, write_recipe
from tests.model_executor.distributed.two_ranks import (
    EXPERT_PARALLEL,
    FP8_MODELS,
    MADE,
    MORE,
    MXFP4_MODEL,
    THROUGH_TRANSFORMERS,
)
from tests.model_executor.parity import build
from tests.model_executor.test_parity import MODELS
from tests.support.fallback_models import build_fallback

DEADLINE_S = 1100


@pytest.mark.integration
@pytest.mark.timeout(1200)  # by two ranks, on cores that may be shared
def test_every_architecture_shared_by_two(tmp_path: Path) -> None:
    for architecture, config in (
        one for group in (MODELS, MORE, FP8_MODELS, MADE, EXPERT_PARALLEL) for one in group.values()
    ):
        build(architecture, **config)  # so that the ranks find them made: of several, transformers saves rank 0's alone
    build(MXFP4_MODEL[0], **MXFP4_MODEL[1])
    for name in THROUGH_TRANSFORMERS:
        build_fallback(name)
    folder = tmp_path / "synthetic"
    folder.mkdir()
    shutil.copy(build("qwen3") / "config.json", folder)
    write_recipe(folder, Recipe("target", 1.0))
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.model_executor.distributed.two_ranks",
                str(tmp_path / "store"),
                str(rank),
                str(folder),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
