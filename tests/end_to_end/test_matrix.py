"""The whole matrix of ``matrix.play``: every model of ``matrix_models.CASES`` with 200 prompts, or with 60 through
transformers, is slow, ``pytest -m slow tests/end_to_end/test_matrix.py``; some with few are in the second tier.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.model_executor.models import support
from outrider.model_executor.models.families import architecture_of
from tests.end_to_end.matrix import play, play_shared
from tests.end_to_end.matrix_models import CASES, FAMILIES
from tests.model_executor.test_parity import MODELS

SMALL = ("qwen3-next", "qwen3.5", "gpt-oss", "qwen3-moe", "mixtral-window", "gemma3")
"""Models with recurrent layers, with experts, and with windows."""
SHARED = ("qwen3-layer-types", "gpt-oss", "gemma3", "qwen3.5", "fallback smollm3", "fallback cohere2", "fallback arcee")
"""Models that two processes share."""


def test_every_family_decoder_and_format_is_in_the_matrix() -> None:
    types = {"mimo", *(MODELS[name][0] for name in FAMILIES)}
    assert {architecture_of(name) for name in types} == {one.architecture for one in support.FAMILIES}
    assert {f"fallback {one.model_type}" for one in support.FALLBACKS if not one.refused} < CASES.keys()
    compared = {name for one in support.FORMATS for name in one.compared}
    assert {"mxfp4", *(f"fp8 {name}" for name in compared - {"mxfp4"})} < CASES.keys()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
async def test_prompts_are_those_of_transformers_in_every_way_of_serving(name: str, tmp_path: Path) -> None:
    num_prompts = 60 if name.startswith("fallback") else 200
    await play(CASES[name](tmp_path), num_prompts=num_prompts, num_coupled=num_prompts // 8)


@pytest.mark.parametrize("name", SMALL)
async def test_some_prompts_are_those_of_transformers_in_every_way_of_serving(name: str, tmp_path: Path) -> None:
    await play(CASES[name](tmp_path), num_prompts=30, num_coupled=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
async def test_prompts_are_those_of_transformers_where_two_processes_share_a_target(name: str, tmp_path: Path) -> None:
    await play_shared(CASES[name](tmp_path), num_prompts=40, num_coupled=8)
