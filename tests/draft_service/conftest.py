"""A tiny draft model, loaded anew for each test that needs its books clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.model_executor.model_runner import ModelRunner
from outrider_draft.proposers.draft_model import ModelProposer
from tests.support.tiny_models import cached_tiny_model, load_reference


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder() -> Path:
    return cached_tiny_model("llama", seed=2)


@pytest.fixture(scope="session")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture
def runner(folder: Path) -> Iterator[ModelRunner]:
    loaded = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=256)
    with torch.inference_mode():
        loaded.kv_cache.fill_(float("nan"))  # a stale read would show
    yield loaded
    loaded.sequences.check_integrity()


@pytest.fixture
def proposer(runner: ModelRunner) -> ModelProposer:
    return ModelProposer(runner)
