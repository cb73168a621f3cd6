"""Fixtures of both services' tests: a tiny model ``folder`` of the package's own, its reference, and a runner of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.model_executor.model_runner import ModelRunner
from tests.support.tiny_models import load_reference


@pytest.fixture(scope="session", name="reference")
def tiny_reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(name="runner")
def tiny_runner(folder: Path) -> Iterator[ModelRunner]:
    loaded = ModelRunner.load(folder, dtype="float32", page_size=4, num_pages=256)
    with torch.inference_mode():
        loaded.kv_cache.fill_(float("nan"))  # a stale read would show
    yield loaded
    loaded.sequences.check_integrity()
