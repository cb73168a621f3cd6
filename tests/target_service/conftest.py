"""A tiny target, loaded for each test, so that its page tables are empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.service_rig import tiny_reference, tiny_runner  # noqa: F401 - fixtures
from tests.support.tiny_models import cached_tiny_model


@pytest.fixture(scope="session")
def folder() -> Path:
    return cached_tiny_model("llama", seed=1)
